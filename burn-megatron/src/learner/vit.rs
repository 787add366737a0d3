//! ViT as burn-train's learner takes it.

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn::train::ClassificationOutput;
use models::images::Vit;

use super::stages::{Part, Stages};

/// A [`Vit`] that learns the classes of images. It is a plain Burn module, in any layout that those have, and a chain of
/// [`Stages`]. What it gives to metrics is of every image: `output [images, classes]` and `targets [images]`.
#[derive(Module, Debug)]
pub struct VitTraining {
    /// The model.
    pub vit: Vit,
}

/// Images of one size.
#[derive(Module, Debug)]
pub struct VitBatch {
    /// `[images, channels, height, width]`.
    pub pixels: Tensor<4>,
    /// The class of each image, `[images]`.
    pub classes: Tensor<1, Int>,
}

impl VitBatch {
    /// Of `pixels`, one image after the other, each `[channels, size, size]`.
    pub fn new(pixels: Vec<f32>, [channels, size]: [usize; 2], classes: &[i64], dtype: DType, device: &Device) -> Self {
        let pixels = TensorData::new(pixels, [classes.len(), channels, size, size]);
        Self { pixels: Tensor::from_data(pixels, (device, dtype)), classes: Tensor::from_data(classes, device) }
    }
}

crate::sendable!(VitBatch: pixels, classes);

impl Stages for VitTraining {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.vit.blocks()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "vit.patches|vit.class|vit.positions", "vit.blocks", "vit.norm|vit.head")
    }

    fn first(&self, batch: &VitBatch) -> Tensor<3> {
        self.vit.embed(batch.pixels.clone())
    }

    fn block(&self, index: usize, x: Tensor<3>, _: &VitBatch) -> Tensor<3> {
        self.vit.block(index, x)
    }

    fn last(&self, x: Tensor<3>, batch: &VitBatch) -> (Tensor<1>, ClassificationOutput) {
        let (logits, classes) = (self.vit.classify(x), batch.classes.clone());
        let loss = Vit::loss(logits.clone(), classes.clone());
        (loss.clone(), ClassificationOutput::new(loss, logits, classes))
    }
}

crate::steps_of_stages!(VitTraining, VitBatch, ClassificationOutput);
