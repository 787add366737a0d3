//! What data-parallel ranks of several processes know of each other's outputs.

use backend_dist::comm::Group;
use burn::tensor::Tensor;
use burn::train::ClassificationOutput;

/// The output with the mean loss of all ranks of the group in place of its own.
pub(super) fn with_mean_loss(output: ClassificationOutput, group: &Group) -> ClassificationOutput {
    let (device, dtype) = (output.loss.device(), output.loss.dtype());
    let all = group.all_gather_host(output.loss.clone().into_scalar::<f64>());
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    ClassificationOutput { loss: Tensor::from_data([mean], (&device, dtype)), ..output }
}
