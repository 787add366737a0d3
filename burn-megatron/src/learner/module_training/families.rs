//! The families as burn-train's learner takes them.

use models::images::{Llava, Vit};
use models::{Bert, T5};

use super::Trainable;
use super::share::Share;
use crate::learner::bert::{BertBatch, BertTraining};
use crate::learner::llava::{LlavaBatch, LlavaTraining};
use crate::learner::t5::{T5Batch, T5Training};
use crate::learner::vit::{VitBatch, VitTraining};

/// A model, its batches, its training with the model's field, and what else it has.
macro_rules! trainable {
    ($model:ty, $batch:ty, $training:ident.$field:ident $(, $($more:tt)+)?) => {
        impl Trainable for $model {
            type Batch = $batch;
            type Training = Share<$training>;

            fn training(self, share: f64) -> Self::Training {
                Share { model: $training { $field: self }, share }
            }

            fn trained(training: Self::Training) -> Self {
                training.model.$field
            }

            $($($more)+)?
        }
    };
}

trainable!(Bert, BertBatch, BertTraining.bert);
trainable!(T5, T5Batch, T5Training.t5);
trainable!(
    Vit,
    VitBatch,
    VitTraining.vit,
    fn no_target(&self) -> Option<usize> {
        None
    }
);
trainable!(
    Llava,
    LlavaBatch,
    LlavaTraining.llava,
    fn no_target(&self) -> Option<usize> {
        Some(self.image_token())
    }
);
