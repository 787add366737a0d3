//! LLaVA as burn-train's learner takes it.

use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn::train::ClassificationOutput;
use models::hf::IGNORED;
use models::images::Llava;

use super::stages::{Part, Stages};

/// A [`Llava`] that learns what is said of images. It is a plain Burn module, in any layout that those have, and a chain of
/// [`Stages`]: the tower's blocks that the decoder sees, then the decoder's. The first of these begins with the projector and
/// the embedding, so that a pipeline may have the tower on stages of its own.
///
/// What it gives to metrics is of every token: `output [tokens, vocabulary]` and `targets [tokens]`, the image token where
/// nothing is learned, which `AccuracyMetric::with_pad_token` leaves out.
#[derive(Module, Debug)]
pub struct LlavaTraining {
    /// The model.
    pub llava: Llava,
}

/// Sequences of one length with their images.
#[derive(Module, Debug)]
pub struct LlavaBatch {
    /// With as many image tokens as the images have features, `[batch, length]`.
    pub tokens: Tensor<2, Int>,
    /// The tokens that are learned, -100 elsewhere; `[batch, length]`.
    pub labels: Tensor<2, Int>,
    /// `[images, channels, height, width]`, in the order of the tokens.
    pub pixels: Tensor<4>,
}

impl LlavaBatch {
    /// Of tokens and labels of sequences of one length, and of `pixels`, one image after the other, each
    /// `[channels, size, size]`.
    pub fn new(
        sequences: &[[Vec<i64>; 2]],
        pixels: Vec<f32>,
        [channels, size]: [usize; 2],
        dtype: DType,
        device: &Device,
    ) -> Self {
        let shape = [sequences.len(), sequences.first().map_or(0, |[tokens, _]| tokens.len())];
        let ints = |which: usize| {
            let values: Vec<i64> = sequences.iter().flat_map(|both| both[which].iter().copied()).collect();
            Tensor::<2, Int>::from_data(TensorData::new(values, shape), device)
        };
        let images = pixels.len() / (channels * size * size);
        let pixels = TensorData::new(pixels, [images, channels, size, size]);
        Self { tokens: ints(0), labels: ints(1), pixels: Tensor::from_data(pixels, (device, dtype)) }
    }
}

crate::sendable!(LlavaBatch: tokens, labels, pixels);

impl Stages for LlavaTraining {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.llava.feature_blocks() + self.llava.decoder().blocks()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        const TOWER: &str = "llava.tower.patches|llava.tower.class|llava.tower.positions|llava.tower.first_norm";
        let seen = self.llava.feature_blocks();
        if path.starts_with("llava.decoder.embedding") && self.llava.decoder().is_tied() {
            return Some(Part::Shared(vec![Part::Block(seen), Part::Last]));
        }
        match Part::by_path(path, "llava.projector|llava.decoder.embedding", "llava.decoder.blocks", "") {
            Some(Part::First) => return Some(Part::Block(seen)),
            Some(Part::Block(index)) => return Some(Part::Block(seen + index)),
            _ => {}
        }
        match Part::by_path(path, TOWER, "llava.tower.blocks", "llava.decoder.norm|llava.decoder.head") {
            // What the decoder does not see of the tower: its last blocks and its last norm.
            Some(Part::Block(index)) if index >= seen => Some(Part::First),
            None if path.starts_with("llava.tower.last_norm") => Some(Part::First),
            part => part,
        }
    }

    fn first(&self, batch: &LlavaBatch) -> Tensor<3> {
        self.llava.tower().embed(batch.pixels.clone())
    }

    fn block(&self, index: usize, x: Tensor<3>, batch: &LlavaBatch) -> Tensor<3> {
        let (llava, decoder) = (&self.llava, self.llava.decoder());
        match index.checked_sub(llava.feature_blocks()) {
            None => llava.tower().block(index, x),
            Some(0) => decoder.block(0, llava.embed(batch.tokens.clone(), llava.project(x))),
            Some(index) => decoder.block(index, x),
        }
    }

    fn last(&self, x: Tensor<3>, batch: &LlavaBatch) -> (Tensor<1>, ClassificationOutput) {
        let (logits, labels) = (self.llava.decoder().logits(x), batch.labels.clone());
        let loss = Llava::loss(logits.clone(), labels.clone());
        let [count, length, vocabulary] = logits.dims();
        // A token's target is the next one.
        let none = Tensor::full([count, 1], IGNORED, &labels.device());
        let targets = Tensor::cat(vec![labels, none], 1).narrow(1, 1, length);
        let targets = targets.clone().mask_fill(targets.equal_elem(IGNORED), self.llava.image_token() as i64);
        let (logits, targets) = (logits.reshape([count * length, vocabulary]), targets.reshape([count * length]));
        (loss.clone(), ClassificationOutput::new(loss, logits, targets))
    }
}

crate::steps_of_stages!(LlavaTraining, LlavaBatch, ClassificationOutput);
