//! Distillation (Hinton et al., "Distilling the Knowledge in a Neural Network", 2015): the loss of a token is
//! `(1 - w) CE + w T² KL(teacher ‖ student)`, both distributions being those of logits divided by the temperature T, and
//! the KL divergence the forward one.

use super::local_batch::LocalBatch;
use backend_dist::ops::{PassContext, PassKind};
use burn::tensor::activation::{log_softmax, softmax};
use burn::tensor::{DType, FloatDType, Int, Tensor};
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

/// A frozen model on this rank: from the tokens `[b, s]` of a rank's positions to logits `[b, s, vocab]`, gathered on all
/// ranks of a tensor-parallel group.
pub type Teacher = Box<dyn Fn(Tensor<2, Int>, &models::MicroBatch) -> Tensor<3>>;

/// The teacher's logits for a micro-batch.
pub(super) fn teach(teacher: &Teacher, local: &LocalBatch, device: &burn::tensor::Device) -> Tensor<3> {
    // It has no dropout and no auxiliary losses.
    let pass = PassContext { kind: PassKind::Evaluation, ..PassContext::default() };
    let batch = models::MicroBatch { pass, dropout: None, auxiliary: 0.0, ..local.micro_batch.clone() };
    teacher(local.tokens.tokens_on(device), &batch)
}

/// The losses `[b, s]` of logits `[b, s, vocab]`, those of the teacher without a graph; in fp32 at least.
pub(super) fn losses(
    student: Tensor<3>,
    teacher: Tensor<3>,
    labels: Tensor<2, Int>,
    config: &DistillConfig,
) -> Tensor<2> {
    let wide = |x: Tensor<3>| if x.dtype() == DType::F64 { x } else { x.cast(FloatDType::F32) };
    let (student, teacher) = (wide(student), wide(teacher));
    let [batch, seq, _] = student.dims();
    let flat = |x: Tensor<3>| x.reshape([batch, seq]);
    let entropy = log_softmax(student.clone(), 2).gather(2, labels.unsqueeze_dim(2)).neg();
    let DistillConfig { temperature, weight } = *config;
    let teacher = teacher.div_scalar(temperature);
    let (wanted, logs) = (softmax(teacher.clone(), 2), log_softmax(teacher, 2));
    let (wanted, logs) = match student.is_autodiff() {
        true => (Tensor::from_inner(wanted), Tensor::from_inner(logs)),
        false => (wanted, logs),
    };
    let divergence = (wanted * (logs - log_softmax(student.div_scalar(temperature), 2))).sum_dim(2);
    flat(entropy.mul_scalar(1.0 - weight) + divergence.mul_scalar(weight * temperature * temperature))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData};

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
        let loss = losses(x.clone(), logits(teacher, &Device::flex()), labels, &config);
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
