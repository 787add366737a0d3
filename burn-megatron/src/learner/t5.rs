//! T5 as burn-train's learner takes it.

use std::ops::Range;

use backend_dist::comm::Group;
use burn::module::Module;
use burn::tensor::{Bool, Device, Gradients, Int, Tensor, TensorData};
use burn::train::ClassificationOutput;
use models::T5;
use models::encoders::cross_entropy;
use models::encoders::t5::T5Positions;
use models::hf::IGNORED;

use super::stages::{Activation, Part, Stages};
use crate::data::masked::T5Sample;

/// A [`T5`] that learns to write an output, such as what was masked in the input. It is a plain Burn module, in any layout
/// that those have, and a chain of [`Stages`].
///
/// What it gives to metrics is of every token: `output [tokens, vocabulary]` and `targets [tokens]`, 0 where there is no
/// label, which `AccuracyMetric::new().with_pad_token(0)` leaves out.
#[derive(Module, Debug)]
pub struct T5Training {
    /// The model.
    pub t5: T5,
}

/// Inputs of one length and outputs of one length.
#[derive(Module, Debug)]
pub struct T5Batch {
    /// What the encoder reads, `[batch, input]`.
    pub input: Tensor<2, Int>,
    /// Which of its tokens are none, `[batch, input]`.
    pub padding: Tensor<2, Bool>,
    /// What the decoder reads, `[batch, output]`.
    pub output: Tensor<2, Int>,
    /// What it writes, -100 where there is nothing to write; `[batch, output]`.
    pub labels: Tensor<2, Int>,
}

impl T5Batch {
    /// Of samples of one length.
    pub fn new(samples: &[T5Sample], device: &Device) -> Self {
        let ints = |of: fn(&T5Sample) -> &[i64]| {
            let values: Vec<i64> = samples.iter().flat_map(of).copied().collect();
            let shape = [samples.len(), values.len() / samples.len().max(1)];
            Tensor::<2, Int>::from_data(TensorData::new(values, shape), device)
        };
        let labels = ints(|sample| &sample.labels);
        Self {
            input: ints(|sample| &sample.encoder),
            padding: ints(|sample| &sample.encoder_mask).equal_elem(0),
            output: ints(|sample| &sample.decoder),
            labels: labels.clone().mask_fill(labels.equal_elem(-1), IGNORED),
        }
    }
}

crate::sendable!(T5Batch: input, padding, output, labels);

/// What one part of a [`T5Training`] hands to the next.
#[derive(Clone, Debug)]
pub struct T5Hidden {
    /// Of the encoder `[batch, input, d_model]`, of the decoder `[batch, output, d_model]`.
    x: Tensor<3>,
    /// In the decoder, the encoder's hidden states `[batch, input, d_model]`: every block reads them, so they travel along,
    /// and their gradient comes back as the sum of all blocks'.
    memory: Option<Tensor<3>>,
    /// What distances add to scores in these blocks, once for all blocks of an autodiff graph. It is not handed to another
    /// graph or rank, which computes it again: it is larger than `x`.
    bias: Option<Tensor<4>>,
}

impl T5Hidden {
    fn new(x: Tensor<3>) -> Self {
        Self { x, memory: None, bias: None }
    }

    /// As a list, which is an activation: the decoder's has two elements.
    fn to_list(&self) -> Vec<Tensor<3>> {
        [self.x.clone()].into_iter().chain(self.memory.clone()).collect()
    }

    fn of_list(list: Vec<Tensor<3>>) -> Self {
        let mut list = list.into_iter();
        let x = list.next().expect("a list of hidden states begins with those of the block before");
        Self { x, memory: list.next(), bias: None }
    }
}

impl Activation for T5Hidden {
    fn untracked(self, device: &Device) -> Self {
        Self::of_list(self.to_list().untracked(device))
    }

    fn leaf(self, device: &Device) -> Self {
        Self::of_list(self.to_list().leaf(device))
    }

    fn inner(self) -> Self {
        Self::of_list(Activation::inner(self.to_list()))
    }

    fn gradient(&self, gradients: &mut Gradients) -> Self {
        Self::of_list(self.to_list().gradient(gradients))
    }

    fn root(self, gradient: Self) -> Option<Tensor<1>> {
        self.to_list().root(gradient.to_list())
    }

    fn send(self, to: usize, group: &Group) {
        self.to_list().send(to, group);
    }

    fn receive(from: usize, device: &Device, group: &Group) -> Self {
        Self::of_list(Activation::receive(from, device, group))
    }
}

/// The encoder's blocks, then the decoder's. The first of these also ends the encoder and embeds the output's tokens.
impl Stages for T5Training {
    type Activation = T5Hidden;

    fn blocks(&self) -> usize {
        self.t5.encoder.blocks.len() + self.t5.decoder.blocks.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        let (encoder, all) = (self.t5.encoder.blocks.len(), self.blocks());
        let blocks = |range: Range<usize>| Some(Part::Shared(range.map(Part::Block).collect()));
        let tied = self.t5.head.is_none().then_some(Part::Last);
        match path {
            "t5.shared.weight" => {
                Some(Part::Shared([Part::First, Part::Block(encoder)].into_iter().chain(tied).collect()))
            }
            "t5.encoder.positions.bias" => blocks(0..encoder),
            "t5.decoder.positions.bias" => blocks(encoder..all),
            "t5.encoder.norm.gamma" => Some(Part::Block(encoder)),
            path => match Part::by_path(path, "", "t5.decoder.blocks", "t5.decoder.norm|t5.head") {
                Some(Part::Block(index)) => Some(Part::Block(encoder + index)),
                Some(part) => Some(part),
                None => Part::by_path(path, "", "t5.encoder.blocks", ""),
            },
        }
    }

    fn first(&self, batch: &T5Batch) -> T5Hidden {
        T5Hidden::new(self.t5.encoder.dropout.forward(self.t5.shared.forward(batch.input.clone())))
    }

    fn block(&self, index: usize, hidden: T5Hidden, batch: &T5Batch) -> T5Hidden {
        let (encoder, decoder) = (&self.t5.encoder, &self.t5.decoder);
        let padding = Some(batch.padding.clone());
        let bias = |positions: &T5Positions, x: &Tensor<3>| positions.forward(0, x.dims()[1], x.dims()[1]);
        if let Some(block) = encoder.blocks.get(index) {
            let T5Hidden { x, bias: known, .. } = hidden;
            let bias = known.unwrap_or_else(|| bias(&encoder.positions, &x));
            return T5Hidden { x: block.forward(x, bias.clone(), padding), memory: None, bias: Some(bias) };
        }
        let (x, memory, known) = match hidden {
            T5Hidden { x, memory: Some(memory), bias } => (x, memory, bias),
            T5Hidden { x, .. } => {
                let output = decoder.dropout.forward(self.t5.shared.forward(batch.output.clone()));
                (output, encoder.finish(x), None)
            }
        };
        let bias = known.unwrap_or_else(|| bias(&decoder.positions, &x));
        let block = &decoder.blocks[index - encoder.blocks.len()];
        let x = block.forward(x, bias.clone(), memory.clone(), padding);
        T5Hidden { x, memory: Some(memory), bias: Some(bias) }
    }

    fn last(&self, hidden: T5Hidden, batch: &T5Batch) -> (Tensor<1>, ClassificationOutput) {
        let logits = self.t5.logits(hidden.x);
        let labels = batch.labels.clone();
        let loss = cross_entropy(logits.clone(), labels.clone());
        let [count, length, vocabulary] = logits.dims();
        let targets = labels.clone().mask_fill(labels.equal_elem(IGNORED), 0);
        let (logits, targets) = (logits.reshape([count * length, vocabulary]), targets.reshape([count * length]));
        (loss.clone(), ClassificationOutput::new(loss, logits, targets))
    }
}

crate::steps_of_stages!(T5Training, T5Batch, ClassificationOutput);
