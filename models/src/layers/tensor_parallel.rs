//! Where activations enter and leave what each tensor parallel rank computes for itself.

use backend_dist::ops::tensor_parallel::{
    Partial, copy_to_tensor_parallel, gather_from_sequence_parallel, reduce_from_tensor_parallel,
    reduce_scatter_to_sequence_parallel,
};
use burn::tensor::Tensor;

use crate::param::TensorParallel;

/// Hands activations to a computation that each rank does for its own outputs: all of the sequence, and backward sums
/// the ranks' gradients.
pub(crate) fn enter_tensor_parallel(x: Tensor<3>, parallel: &TensorParallel) -> Tensor<3> {
    match parallel.sequence {
        true => gather_from_sequence_parallel(x, &parallel.group),
        false => copy_to_tensor_parallel(x, &parallel.group),
    }
}

/// Sums the ranks' summands: all of the sequence on every rank, or each rank's part of it.
pub(crate) fn leave_tensor_parallel(x: Partial<3>, parallel: &TensorParallel) -> Tensor<3> {
    match parallel.sequence {
        true => reduce_scatter_to_sequence_parallel(x, &parallel.group),
        false => reduce_from_tensor_parallel(x, &parallel.group),
    }
}
