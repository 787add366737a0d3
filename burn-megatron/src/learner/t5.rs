//! T5 as burn-train's learner takes it.

use burn::module::Module;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn::train::{ClassificationOutput, InferenceStep, TrainOutput, TrainStep};
use models::T5;
use models::encoders::cross_entropy;
use models::hf::IGNORED;

use crate::data::masked::T5Sample;

/// A [`T5`] that learns to write an output, such as what was masked in the input. It is a plain Burn module, in any layout
/// that those have.
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

impl T5Training {
    /// The loss, and what metrics take.
    pub fn run(&self, batch: T5Batch) -> (Tensor<1>, ClassificationOutput) {
        let T5Batch { input, padding, output, labels } = batch;
        let logits = self.t5.forward(input, Some(padding), output);
        let loss = cross_entropy(logits.clone(), labels.clone());
        let [count, length, vocabulary] = logits.dims();
        let targets = labels.clone().mask_fill(labels.equal_elem(IGNORED), 0);
        let (logits, targets) = (logits.reshape([count * length, vocabulary]), targets.reshape([count * length]));
        (loss.clone(), ClassificationOutput::new(loss, logits, targets))
    }
}

impl TrainStep for T5Training {
    type Input = T5Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: T5Batch) -> TrainOutput<ClassificationOutput> {
        let (loss, output) = self.run(batch);
        TrainOutput::new(self, loss.backward(), output)
    }
}

impl InferenceStep for T5Training {
    type Input = T5Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: T5Batch) -> ClassificationOutput {
        self.run(batch).1
    }
}
