//! The loss of predicting tokens.

use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor};

use super::single::at_least_single;
use crate::hf::IGNORED;

/// The mean cross-entropy of `logits [batch, sequence, classes]` over the `labels [batch, sequence]` that are not
/// -100, in at least single precision. It is zero, with gradients of zero, if none counts: a micro-batch may have no masked
/// token.
pub fn cross_entropy(logits: Tensor<3>, labels: Tensor<2, Int>) -> Tensor<1> {
    let ignored = labels.clone().equal_elem(IGNORED);
    let targets = labels.mask_fill(ignored.clone(), 0).unsqueeze_dim::<3>(2);
    let losses = log_softmax(at_least_single(logits), 2).gather(2, targets).squeeze_dim::<2>(2).neg();
    let dtype = losses.dtype();
    let counted = ignored.clone().bool_not().int().sum().clamp_min(1).float().cast(dtype);
    losses.mask_fill(ignored, 0.0).sum() / counted
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::*;
    use crate::encoders::bert::Bert;
    use crate::images::Llava;

    /// Loss, and gradient of the logits.
    fn of(labels: [i64; 3], loss: impl Fn(Tensor<3>, Tensor<2, Int>) -> Tensor<1>) -> (f64, Vec<f64>) {
        let device = Device::flex().autodiff();
        let values: Vec<f64> = (0..12).map(|index| f64::from(index).sin()).collect();
        let logits = Tensor::<3>::from_data(TensorData::new(values, [1, 3, 4]), &device).require_grad();
        let labels = Tensor::from_data(TensorData::new(labels.to_vec(), [1, 3]), &device);
        let loss = loss(logits.clone(), labels);
        let gradient = logits.grad(&loss.clone().backward()).unwrap();
        (loss.into_data().iter::<f64>().sum(), gradient.into_data().iter::<f64>().collect())
    }

    /// It was 0 / 0, and the weights NaN after the step.
    #[test]
    fn a_micro_batch_without_labels_has_no_loss_and_no_gradient() {
        let bert = |logits, labels| Bert::loss(logits, labels, None);
        for (loss, gradient) in
            [of([IGNORED; 3], cross_entropy), of([IGNORED; 3], bert), of([2, IGNORED, IGNORED], Llava::loss)]
        {
            assert_eq!((loss, gradient), (0.0, vec![0.0; 12]));
        }
        // One label is the mean of one.
        let (loss, gradient) = of([IGNORED, 2, IGNORED], cross_entropy);
        let sum: f64 = (4..8).map(|index| f64::from(index).sin().exp()).sum();
        assert!((loss - (sum.ln() - 6f64.sin())).abs() < 1e-6, "{loss}");
        assert!(gradient[4..8].iter().all(|slope| *slope != 0.0) && gradient[..4] == [0.0; 4]);
    }
}
