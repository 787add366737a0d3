//! Distillation (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015): the loss of a token is
//! `(1 - w) CE + w T² KL(teacher ‖ student)`, both distributions being those of logits divided by the temperature T, and
//! the KL divergence the forward one.

use super::TokenBatch;
use super::local_batch::LocalBatch;
use crate::data::TopK;
use backend_dist::ops::{PassContext, PassKind, log_sum_exp, softmax, sum_dim};
use burn::tensor::{DType, Device, FloatDType, IndexingUpdateOp, Int, Tensor, TensorData};
use models::layout::ModelDims;
use models::{CausalLm, MicroBatch};
use serde::{Deserialize, Serialize};

/// The constants of distillation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DistillConfig {
    /// T.
    pub temperature: f64,
    /// w.
    pub weight: f64,
}

/// A frozen model on this rank, or a stage of one.
pub struct Teacher {
    /// Features of its activations.
    pub(super) hidden: usize,
    model: Box<dyn Frozen>,
}

impl Teacher {
    /// A teacher of size `dims`, built without autodiff.
    pub fn new<M: CausalLm + 'static>(model: M, dims: &ModelDims) -> Self {
        Self { hidden: dims.hidden, model: Box::new(model) }
    }

    /// Logits `[b, s, vocab]` of the tokens `[b, s]` of a rank's positions, gathered on all ranks of a tensor-parallel group.
    ///
    /// # Panics
    /// If the model is not whole.
    pub fn logits(&self, tokens: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<3> {
        self.model.logits(self.model.activations(tokens, None, batch))
    }

    /// The activations after this stage, of those that the stage before has sent.
    pub(super) fn activations(&self, local: &LocalBatch, before: Option<Tensor<3>>, device: &Device) -> Tensor<3> {
        // It has no dropout and no auxiliary losses.
        let pass = PassContext { kind: PassKind::Evaluation, ..PassContext::default() };
        let batch = MicroBatch { pass, dropout: None, auxiliary: 0.0, ..local.micro_batch.clone() };
        self.model.activations(local.tokens.tokens_on(device), before, &batch)
    }

    /// The logits of the last stage's activations.
    pub(super) fn logits_of(&self, activations: Tensor<3>) -> Tensor<3> {
        self.model.logits(activations)
    }
}

/// A stage of any family.
trait Frozen {
    fn activations(&self, tokens: Tensor<2, Int>, before: Option<Tensor<3>>, batch: &MicroBatch) -> Tensor<3>;
    fn logits(&self, activations: Tensor<3>) -> Tensor<3>;
}

impl<M: CausalLm> Frozen for M {
    fn activations(&self, tokens: Tensor<2, Int>, before: Option<Tensor<3>>, batch: &MicroBatch) -> Tensor<3> {
        let x = before.unwrap_or_else(|| self.embed(tokens, batch));
        self.part().layers.clone().fold(x, |x, layer| self.layer(layer, x, batch))
    }

    fn logits(&self, activations: Tensor<3>) -> Tensor<3> {
        self.head_logits(activations)
    }
}

/// What a teacher says of a micro-batch, without a graph.
#[derive(Clone)]
pub(super) enum Taught {
    /// `[b, s, vocab]`.
    Logits(Tensor<3>),
    /// The likeliest tokens `[b, s, k]`, and their probabilities and that of all others `[b, s, k + 1]`.
    TopK(Tensor<3, Int>, Box<Tensor<3>>),
}

impl Taught {
    /// What a file says of a rank's positions of sequences.
    pub fn of_file(batch: &TokenBatch, device: &Device) -> Option<Self> {
        let TopK { k, ids, probabilities } = batch.taught.as_ref()?;
        let (sequences, seq) = (batch.sequences, batch.seq);
        let ids = ids.iter().map(|id| i64::from(*id)).collect::<Vec<_>>();
        let ids = Tensor::from_data(TensorData::new(ids, [sequences, seq, *k]), (device, DType::I64));
        let data = TensorData::new(probabilities.clone(), [sequences, seq, k + 1]);
        Some(Self::TopK(ids, Box::new(Tensor::from_data(data, (device, DType::F64)))))
    }
}

/// The losses `[b, s]` of logits `[b, s, vocab]`, and the KL divergences in them, without a graph; in fp32 at least. Of the
/// likeliest tokens of a file, the divergence is that of the distributions over these and all others together.
pub(super) fn losses(
    student: Tensor<3>,
    taught: Taught,
    labels: Tensor<2, Int>,
    config: &DistillConfig,
) -> (Tensor<2>, Tensor<2>) {
    let wide = |x: Tensor<3>| if x.dtype() == DType::F64 { x } else { x.cast(FloatDType::F32) };
    let student = wide(student);
    let [batch, seq, _] = student.dims();
    let flat = |x: Tensor<3>| x.reshape([batch, seq]);
    let log_softmax = |x: Tensor<3>| x.clone() - log_sum_exp(x);
    let entropy = log_sum_exp(student.clone()) - student.clone().gather(2, labels.unsqueeze_dim(2));
    let DistillConfig { temperature, weight } = *config;
    let tracked = student.device().is_autodiff();
    let constant = |x: Tensor<3>| if tracked { Tensor::from_inner(x) } else { x };
    let found = log_softmax(student.div_scalar(temperature));
    let (wanted, logs, found) = match taught {
        Taught::Logits(teacher) => {
            let teacher = wide(teacher).div_scalar(temperature);
            (softmax(teacher.clone()), log_softmax(teacher), found)
        }
        Taught::TopK(ids, wanted) => {
            let wanted = (*wanted).cast(found.dtype());
            let ids = if tracked { Tensor::from_inner(ids) } else { ids };
            // Summed over the others, for 1 minus the sum of the likeliest has no digits left where these are all.
            let far = Tensor::full(ids.dims(), FAR, (&found.device(), found.dtype()));
            let others = found.clone().scatter(2, ids.clone(), far, IndexingUpdateOp::Add);
            let rest = log_sum_exp(others);
            // A probability of 0 has no logarithm, and no share in the sum.
            let logs = wanted.clone().clamp_min(LEAST).log();
            (wanted, logs, Tensor::cat(vec![found.gather(2, ids), rest], 2))
        }
    };
    let divergence = sum_dim(constant(wanted) * (constant(logs) - found), 2);
    let seen = flat(if tracked { divergence.clone().inner() } else { divergence.clone() });
    (flat(entropy.mul_scalar(1.0 - weight) + divergence.mul_scalar(weight * temperature * temperature)), seen)
}

/// Added to a log-probability that is not to count.
const FAR: f64 = -1e30;

/// Probabilities below it count as this.
const LEAST: f64 = 1e-30;

#[cfg(test)]
mod tests {
    use super::*;

    /// Of all tokens it is the whole divergence; of some, that of the lumped distributions.
    #[test]
    fn the_likeliest_tokens_and_the_rest() {
        let (device, config) = (Device::flex().autodiff(), DistillConfig { temperature: 1.0, weight: 1.0 });
        let wanted = [0.5, 0.25, 0.125, 0.125];
        let logits = [0.3, -0.2, 0.9, 0.1];
        let total: f64 = logits.iter().map(|x: &f64| x.exp()).sum();
        let q = logits.map(|x| x.exp() / total);
        for (k, groups) in [(4, vec![vec![0], vec![1], vec![2], vec![3]]), (2, vec![vec![0], vec![1], vec![2, 3]])] {
            let mut said = TopK { k, ids: Vec::new(), probabilities: Vec::new() };
            said.push(&wanted);
            let data = TensorData::new(logits.to_vec(), [1, 1, 4]);
            let x = Tensor::<3>::from_data(data, (&device, DType::F64)).require_grad();
            let labels = Tensor::<2, Int>::from_data([[2]], (&device, DType::I64));
            let batch = TokenBatch { taught: Some(said), ..TokenBatch::from_sequences(&[0, 2], 1) };
            let taught = Taught::of_file(&batch, &Device::flex()).unwrap();
            let (loss, divergence) = losses(x.clone(), taught, labels, &config);
            let sum = |of: &[f64], group: &Vec<usize>| group.iter().map(|at| of[*at]).sum::<f64>();
            let expected: f64 =
                groups.iter().map(|group| sum(&wanted, group) * (sum(&wanted, group) / sum(&q, group)).ln()).sum();
            let found: Vec<f64> = loss.clone().into_data().iter().collect();
            assert!((found[0] - expected).abs() < 1e-12, "{k}: {found:?} {expected}");
            assert!((divergence.into_scalar::<f64>() - expected).abs() < 1e-12, "it is all of the loss");
            let gradient: Vec<f64> = x.grad(&loss.sum().backward()).unwrap().into_data().iter().collect();
            for group in &groups {
                for at in group {
                    let expected = q[*at] - q[*at] / sum(&q, group) * sum(&wanted, group);
                    assert!((gradient[*at] - expected).abs() < 1e-12, "{k}: {gradient:?}");
                }
            }
        }
    }

    #[test]
    fn losses_are_the_formula_and_gradients_the_difference_of_distributions() {
        let (student, teacher) = ([0.5, -1.0, 2.0, 0.25], [1.0, 0.0, -0.5, 0.75]);
        let device = Device::flex().autodiff();
        let logits = |values: [f64; 4], device: &Device| {
            Tensor::<3>::from_data(TensorData::new(values.to_vec(), [1, 1, 4]), (device, DType::F64))
        };
        let config = DistillConfig { temperature: 2.0, weight: 0.7 };
        let softmax = |values: [f64; 4], temperature: f64| {
            let exps = values.map(|value| (value / temperature).exp());
            exps.map(|exp| exp / exps.iter().sum::<f64>())
        };
        let (p, q) = (softmax(teacher, 2.0), softmax(student, 2.0));
        let kl: f64 = (0..4).map(|at| p[at] * (p[at] / q[at]).ln()).sum();
        let expected = -0.3 * softmax(student, 1.0)[2].ln() + 0.7 * 4.0 * kl;
        let x = logits(student, &device).require_grad();
        let labels = Tensor::<2, Int>::from_data([[2]], (&device, DType::I64));
        let (loss, divergence) = losses(x.clone(), Taught::Logits(logits(teacher, &Device::flex())), labels, &config);
        assert!((divergence.into_scalar::<f64>() - kl).abs() < 1e-12);
        let found: Vec<f64> = loss.clone().into_data().iter().collect();
        assert!((found[0] - expected).abs() < 1e-12, "{found:?} {expected}");
        let gradients = loss.sum().backward();
        let gradient: Vec<f64> = x.grad(&gradients).unwrap().into_data().iter().collect();
        for at in 0..4 {
            let label = if at == 2 { 1.0 } else { 0.0 };
            let expected = 0.3 * (softmax(student, 1.0)[at] - label) + 0.7 * 2.0 * (q[at] - p[at]);
            assert!((gradient[at] - expected).abs() < 1e-12, "{at}: {gradient:?} {expected}");
        }
    }
}
