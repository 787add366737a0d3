//! The attention of a decode step, where every sequence has one new token and its keys and values are in blocks.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor, tensor::IntTensor};
use burn::tensor::{DType, Device, Int, Tensor};
use kernels_cubecl::decode::{DecodeShape, has_likeliest};

use super::options::{AttentionOptions, PackedHeads};
use crate::gpu;

/// What the kernels of a decode step read besides queries, keys and values.
#[derive(Clone, Copy, Debug)]
pub struct PagedAttention {
    /// Heads of the packed projection.
    pub heads: PackedHeads,
    /// Length of a head.
    pub head_dim: usize,
    /// Positions of a block.
    pub block_size: usize,
    /// Scale and window; anything else has no kernel.
    pub options: AttentionOptions,
}

impl PagedAttention {
    /// Whether there are kernels for tensors of this kind. They run on NVIDIA GPUs and know no softcap.
    pub fn has_kernel(&self, dtype: DType, device: &Device) -> bool {
        let AttentionOptions { softcap, dropout, causal, .. } = self.options;
        let known = matches!(dtype, DType::BF16 | DType::F16 | DType::F32);
        let plain = causal && softcap.is_none() && dropout.is_none();
        plain && known && gpu::index(device).is_some() && self.shape(1, 1, 1).has_kernel()
    }

    pub(super) fn shape(&self, sequences: usize, pages: usize, max_blocks: usize) -> DecodeShape {
        let Self { heads: PackedHeads { heads, kv_heads }, head_dim, block_size, .. } = *self;
        DecodeShape { sequences, heads, kv_heads, head_dim, block_size, pages, max_blocks }
    }
}

/// Writes the keys and values of the new tokens in `qkv [sequences, 1, heads + 2 kv_heads, d]` **in place** into the
/// caches `[slots, kv_heads d]`, whoever else holds them, and returns the attention of the queries,
/// `[sequences, 1, heads, d]`. `table [sequences, max_blocks]` lists the blocks of each sequence, `lengths [sequences]`
/// its positions with the new one; both are i32 and read on the device only. A sequence of length 0 is left out.
///
/// # Panics
/// Unless [`PagedAttention::has_kernel`], or if a size does not fit.
pub fn paged_attention(
    qkv: Tensor<4>,
    [keys, values]: [&Tensor<2>; 2],
    [table, lengths]: [Tensor<1, Int>; 2],
    call: PagedAttention,
) -> Tensor<4> {
    let [keys, values] = [keys, values].map(|cache| cache.clone().into_dispatch());
    let (qkv, table, lengths) = (qkv.into_dispatch(), table.into_dispatch(), lengths.into_dispatch());
    Tensor::from_dispatch(<Dispatch as DecodeOps>::op_paged_attention(qkv, keys, values, table, lengths, call))
}

/// The first column of the greatest number of each row of `logits [rows, columns]`, or −1 if one of them is not finite;
/// `None` where there is no kernel for it: it runs on NVIDIA GPUs, for columns that are a multiple of 8.
pub fn likeliest(logits: &Tensor<2>) -> Option<Tensor<1, Int>> {
    let known = matches!(logits.dtype(), DType::BF16 | DType::F16 | DType::F32);
    let has_kernel = known && gpu::index(&logits.device()).is_some() && has_likeliest(logits.dims()[1]);
    has_kernel.then(|| Tensor::from_dispatch(<Dispatch as DecodeOps>::op_likeliest(logits.clone().into_dispatch())))
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"))]
pub(super) trait DecodeOps: Backend {
    fn op_paged_attention(
        qkv: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        table: IntTensor<Self>,
        lengths: IntTensor<Self>,
        call: PagedAttention,
    ) -> FloatTensor<Self>;

    fn op_likeliest(logits: FloatTensor<Self>) -> IntTensor<Self>;
}

impl DecodeOps for burn::backend::Flex {
    fn op_paged_attention(
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: IntTensor<Self>,
        _: IntTensor<Self>,
        call: PagedAttention,
    ) -> FloatTensor<Self> {
        panic!("{call:?} has kernels on GPUs only")
    }

    fn op_likeliest(_: FloatTensor<Self>) -> IntTensor<Self> {
        panic!("`likeliest` has a kernel on GPUs only")
    }
}
