//! Vision models as burn-train's learner takes them.

use models::images::{Llava, Vit};

use super::Trainable;
use super::share::Share;
use crate::learner::llava::{LlavaBatch, LlavaTraining};
use crate::learner::vit::{VitBatch, VitTraining};

impl Trainable for Vit {
    type Batch = VitBatch;
    type Training = Share<VitTraining>;

    fn training(self, share: f64) -> Self::Training {
        Share { model: VitTraining { vit: self }, share }
    }

    fn trained(training: Self::Training) -> Self {
        training.model.vit
    }

    fn no_target(&self) -> Option<usize> {
        None
    }
}

impl Trainable for Llava {
    type Batch = LlavaBatch;
    type Training = Share<LlavaTraining>;

    fn training(self, share: f64) -> Self::Training {
        Share { model: LlavaTraining { llava: self }, share }
    }

    fn trained(training: Self::Training) -> Self {
        training.model.llava
    }

    fn no_target(&self) -> Option<usize> {
        Some(self.image_token())
    }
}
