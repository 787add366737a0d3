//! Attention in a context in front of a linear layer, of which only the packed projection is kept: the backward pass
//! computes it again, and all ranks do its exchanges again.

use burn::backend::{TensorMetadata, tensor::FloatTensor};

use super::kernels::ContextKernels;
use super::neighbours::Neighbours;
use super::ways::{How, Kept, backward, forward};
use crate::ops::options::PackedHeads;
use crate::ops::plain::attention::unpack;
use crate::ops::prologue::side_by_side;

/// What the gradient needs.
pub(in crate::ops) struct Again<B: ContextKernels> {
    kept: Kept<B>,
    shape: burn::tensor::Shape,
    kv_heads: usize,
}

/// Attention of `qkv [s, b, heads + 2 kv_heads, d]`, its heads side by side.
pub(in crate::ops) fn attend<B: ContextKernels + Neighbours>(
    qkv: FloatTensor<B>,
    heads: PackedHeads,
    how: &How,
) -> (FloatTensor<B>, Again<B>) {
    let (out, kept) = forward::<B>(unpack::<B>(qkv, heads), how);
    let shape = out.shape();
    (side_by_side::<B>(out), Again { kept, shape, kv_heads: heads.kv_heads })
}

impl<B: ContextKernels + Neighbours> Again<B> {
    /// The gradient of the packed projection from that of the heads side by side.
    pub fn grad(self, grad: FloatTensor<B>, how: &How) -> FloatTensor<B> {
        let grad = B::float_reshape(grad, self.shape);
        B::float_cat(backward::<B>(self.kept, grad, self.kv_heads, how).into(), 2)
    }
}
