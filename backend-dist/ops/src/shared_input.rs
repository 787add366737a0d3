//! The gradient of a tensor that two linear layers read, as a frozen weight and its adapter do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::backend::{Backend, tensor::FloatTensor};

use super::{
    kernels::LocalKernels,
    stash::{HandOvers, Stash},
};

/// The input of two linear layers, whose outputs are both used. The layer that runs first in the backward pass, which is
/// the last in the forward pass, leaves its GEMM to the other, unless that has collectives or is in FP8. The other has it add
/// to its own gradient: a sum of both would be a pass over memory more. Clones are the same input.
#[derive(Clone, Debug, Default)]
pub struct SharedInput {
    was_read: Arc<AtomicBool>,
    left: Stash,
    writer_adds: bool,
}

/// A GEMM that is left: the gradient of a layer's output, and its weight.
pub(super) type LeftGemm<B> = [FloatTensor<B>; 2];

impl SharedInput {
    /// A GEMM that nobody takes is counted.
    pub fn new(hand_overs: &HandOvers) -> Self {
        Self { left: Stash::counted(hand_overs), ..Self::default() }
    }

    /// The operation that wrote the input adds what the first layer leaves, and not the second layer. It has to be told of
    /// the same input.
    pub fn added_by_writer(hand_overs: &HandOvers) -> Self {
        Self { writer_adds: true, ..Self::new(hand_overs) }
    }

    /// Whether the layer that asks is the first of the two in the backward pass.
    pub(super) fn is_first(&self) -> bool {
        !self.was_read.swap(true, Ordering::Relaxed)
    }

    /// Leaves a gradient's GEMM.
    pub(super) fn leave<B: Backend>(&self, gemm: LeftGemm<B>) {
        self.left.put(gemm);
    }

    /// What the first layer has left to the writer.
    pub(super) fn left_to_writer<B: Backend>(&self) -> Option<LeftGemm<B>> {
        if self.writer_adds { self.left.take() } else { None }
    }

    /// The second layer's gradient `own` with what the first has left to it.
    pub(super) fn with_left<B: LocalKernels>(&self, own: FloatTensor<B>) -> FloatTensor<B> {
        with_added::<B>(own, if self.writer_adds { None } else { self.left.take() })
    }
}

/// The sum of a gradient and a GEMM that was left.
pub(super) fn with_added<B: LocalKernels>(own: FloatTensor<B>, left: Option<LeftGemm<B>>) -> FloatTensor<B> {
    match left {
        Some([grad, w]) => B::linear_add_input_grad(own, grad, w),
        None => own,
    }
}
