//! BERT as burn-train's learner takes it.

use burn::module::Module;
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn::train::ClassificationOutput;
use models::Bert;
use models::hf::IGNORED;

use super::stages::{Part, Stages};
use crate::data::masked::BertSample;

/// A [`Bert`] that learns what masked tokens were, and whether the second sentence follows the first if the model has that
/// head. It is a plain Burn module, in any layout that those have, and a chain of [`Stages`].
///
/// What it gives to metrics is of every token: `output [tokens, vocabulary]` and `targets [tokens]`, 0 where no token is
/// masked, which `AccuracyMetric::new().with_pad_token(0)` leaves out.
#[derive(Module, Debug)]
pub struct BertTraining {
    /// The model.
    pub bert: Bert,
}

/// Sequences of one length.
#[derive(Module, Debug)]
pub struct BertBatch {
    /// `[batch, sequence]`.
    pub tokens: Tensor<2, Int>,
    /// Of which sentence each token is, `[batch, sequence]`.
    pub types: Tensor<2, Int>,
    /// Which tokens are none, `[batch, sequence]`.
    pub padding: Tensor<2, Bool>,
    /// What a masked token was, -100 elsewhere; `[batch, sequence]`.
    pub labels: Tensor<2, Int>,
    /// 0 where the second sentence follows the first, else 1; `[batch]`.
    pub next_sentence: Tensor<1, Int>,
}

impl BertBatch {
    /// Of samples of one length.
    pub fn new(samples: &[BertSample], device: &Device) -> Self {
        let shape = [samples.len(), samples.first().map_or(0, |sample| sample.tokens.len())];
        let ints = |of: fn(&BertSample) -> &[i64]| {
            let values: Vec<i64> = samples.iter().flat_map(of).copied().collect();
            Tensor::<2, Int>::from_data(TensorData::new(values, shape), device)
        };
        let random: Vec<i64> = samples.iter().map(|sample| sample.is_random.into()).collect();
        Self {
            tokens: ints(|sample| &sample.tokens),
            types: ints(|sample| &sample.types),
            padding: ints(|sample| &sample.padding_mask).equal_elem(0),
            labels: ints(|sample| &sample.labels).mask_fill(ints(|sample| &sample.labels).equal_elem(-1), IGNORED),
            next_sentence: Tensor::from_data(random.as_slice(), device),
        }
    }
}

crate::sendable!(BertBatch: tokens, types, padding, labels, next_sentence);

impl Stages for BertTraining {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.bert.layers.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        match path {
            "bert.embeddings.words.weight" => Some(Part::Tied),
            path => {
                Part::by_path(path, "bert.embeddings", "bert.layers", "bert.predictions|bert.pooler|bert.next_sentence")
            }
        }
    }

    fn first(&self, batch: &BertBatch) -> Tensor<3> {
        self.bert.embeddings.forward(batch.tokens.clone(), Some(batch.types.clone()))
    }

    fn block(&self, index: usize, x: Tensor<3>, batch: &BertBatch) -> Tensor<3> {
        self.bert.layers[index].forward(x, Some(batch.padding.clone()))
    }

    fn last(&self, x: Tensor<3>, batch: &BertBatch) -> (Tensor<1>, ClassificationOutput) {
        let logits = self.bert.logits(x.clone());
        let relations = self.bert.next_sentence_logits(x);
        let next = relations.map(|relations| (relations, batch.next_sentence.clone()));
        let loss = Bert::loss(logits.clone(), batch.labels.clone(), next);
        let [count, length, vocabulary] = logits.dims();
        let targets = batch.labels.clone().mask_fill(batch.labels.clone().equal_elem(IGNORED), 0);
        let (logits, targets) = (logits.reshape([count * length, vocabulary]), targets.reshape([count * length]));
        (loss.clone(), ClassificationOutput::new(loss, logits, targets))
    }
}

crate::steps_of_stages!(BertTraining, BertBatch, ClassificationOutput);
