//! The attention of a decode step, where every sequence has one new token and its keys and values are in blocks.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor, tensor::IntTensor};
use burn::tensor::{DType, Device, Int, Tensor};
use kernels_cubecl::decode::{DecodeShape, FewRows, MOST_COPIES};

use super::kernels::LocalKernels;
use super::operation::Tensors;
use super::options::{AttentionOptions, PackedHeads};

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
/// `[sequences, 1, heads, d]`. With `angles`, cosines and sines `[sequences, rotated / 2]`, queries and keys are rotated
/// before, as by [`rope_packed`](super::rope_packed). `table [sequences, max_blocks]` lists the blocks of each sequence,
/// `lengths [sequences]` its positions with the new one; both are i32 and read on the device only. A sequence of length 0
/// is left out.
///
/// # Panics
/// Unless [`PagedAttention::has_kernel`], or if a size does not fit.
pub fn paged_attention(
    qkv: Tensor<4>,
    angles: Option<[Tensor<2>; 2]>,
    [keys, values]: [&Tensor<2>; 2],
    [table, lengths]: [Tensor<1, Int>; 2],
    call: PagedAttention,
) -> Tensor<4> {
    let angles = Tensors::floats(angles.into_iter().flatten().map(Tensor::into_dispatch));
    let [keys, values] = [keys, values].map(|cache| cache.clone().into_dispatch());
    let (qkv, table, lengths) = (qkv.into_dispatch(), table.into_dispatch(), lengths.into_dispatch());
    Tensor::from_dispatch(<Dispatch as DecodeOps>::op_paged_attention(qkv, angles, keys, values, table, lengths, call))
}

/// `silu(gate) up` of `x · wᵀ = [gate | up]` for `x [.., in]` and `w [2 out, in]`: [`swiglu`](super::swiglu) of
/// [`linear`](super::linear), and its bits. For few rows on NVIDIA GPUs it is one kernel.
///
/// # Panics
/// If the sizes do not fit, or the tensors record gradients.
pub fn swiglu_linear<const D: usize>(x: Tensor<D>, w: Tensor<2>) -> Tensor<D> {
    let ([features, inner], last) = (w.dims(), x.dims()[D - 1]);
    assert!(inner == last && features.is_multiple_of(2), "swiglu: {last} features times [{features}, {inner}]ᵀ");
    let (x, w) = (x.into_dispatch(), w.into_dispatch());
    Tensor::from_dispatch(<Dispatch as DecodeOps>::op_swiglu_linear(x, w))
}

/// A layer of experts for few tokens. Which rows an expert has is read on the device, so the host waits for nothing.
#[derive(Clone, Copy, Debug)]
pub struct FewTokens {
    /// Copies of tokens, for all experts.
    pub copies: usize,
    /// Experts, whose matrices `w [experts · features, inner]` are one below the other.
    pub experts: usize,
}

impl FewTokens {
    /// Whether there is a kernel for the matrices `[experts · features, inner]`, and experts have so few tokens that
    /// reading them is most of the time.
    pub fn has_kernel(&self, [rows, inner]: [usize; 2], dtype: DType, device: &Device) -> bool {
        /// Copies of an expert on average. More of them are better padded to the tiles of a grouped GEMM.
        const FEW: usize = 8;
        let Self { copies, experts } = *self;
        let known = matches!(dtype, DType::BF16 | DType::F16 | DType::F32) && gpu::index(device).is_some();
        let sizes = FewRows { rows: copies, groups: experts, features: rows / experts, inner };
        known && copies <= MOST_COPIES.min(FEW * experts) && sizes.has_kernel()
    }

    /// The first layer: for each of the `slots [copies, 1]`, i32 numbers `token · experts + expert` in the order of the
    /// experts, the token's row of `x [tokens, inner]` times the expert's matrix, `[copies, features]`.
    ///
    /// # Panics
    /// Unless [`has_kernel`](Self::has_kernel).
    pub fn linear(self, x: Tensor<2>, w: Tensor<2>, slots: Tensor<2, Int>) -> Tensor<2> {
        self.check(x.dims()[1], w.dims(), slots.dims());
        let (x, w, slots) = (x.into_dispatch(), w.into_dispatch(), slots.into_dispatch());
        Tensor::from_dispatch(<Dispatch as DecodeOps>::op_slots_linear(x, w, slots, self.experts))
    }

    /// The second layer, of `silu(gate) up p` for `x [copies, 2 inner] = [gate | up]` and `p [copies]`, `[copies,
    /// features]`.
    ///
    /// # Panics
    /// Unless [`has_kernel`](Self::has_kernel).
    pub fn swiglu_linear(self, x: Tensor<2>, p: Tensor<1>, w: Tensor<2>, slots: Tensor<2, Int>) -> Tensor<2> {
        self.check(x.dims()[1] / 2, w.dims(), slots.dims());
        let (x, p) = (x.into_dispatch(), p.into_dispatch());
        let (w, slots) = (w.into_dispatch(), slots.into_dispatch());
        Tensor::from_dispatch(<Dispatch as DecodeOps>::op_slots_swiglu_linear(x, p, w, slots, self.experts))
    }

    fn check(&self, inputs: usize, w: [usize; 2], slots: [usize; 2]) {
        let fits = slots == [self.copies, 1] && w[0].is_multiple_of(self.experts) && inputs == w[1];
        assert!(fits, "{self:?}: {inputs} features, matrices {w:?}, slots {slots:?}");
    }
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"))]
pub(super) trait DecodeOps: Backend {
    fn op_slots_linear(
        x: FloatTensor<Self>,
        w: FloatTensor<Self>,
        slots: IntTensor<Self>,
        experts: usize,
    ) -> FloatTensor<Self>;

    fn op_slots_swiglu_linear(
        x: FloatTensor<Self>,
        p: FloatTensor<Self>,
        w: FloatTensor<Self>,
        slots: IntTensor<Self>,
        experts: usize,
    ) -> FloatTensor<Self>;

    fn op_paged_attention(
        qkv: FloatTensor<Self>,
        #[extension_type] angles: Tensors<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        table: IntTensor<Self>,
        lengths: IntTensor<Self>,
        call: PagedAttention,
    ) -> FloatTensor<Self>;

    fn op_swiglu_linear(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl DecodeOps for burn::backend::Flex {
    fn op_slots_linear(_: FloatTensor<Self>, _: FloatTensor<Self>, _: IntTensor<Self>, _: usize) -> FloatTensor<Self> {
        panic!("experts of few tokens have kernels on GPUs only")
    }

    fn op_slots_swiglu_linear(
        x: FloatTensor<Self>,
        _: FloatTensor<Self>,
        w: FloatTensor<Self>,
        slots: IntTensor<Self>,
        experts: usize,
    ) -> FloatTensor<Self> {
        Self::op_slots_linear(x, w, slots, experts)
    }

    fn op_paged_attention(
        _: FloatTensor<Self>,
        _: Tensors<Self>,
        _: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: IntTensor<Self>,
        _: IntTensor<Self>,
        call: PagedAttention,
    ) -> FloatTensor<Self> {
        panic!("{call:?} has kernels on GPUs only")
    }

    fn op_swiglu_linear(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::swiglu_forward(Self::linear_forward(x, w))
    }
}
