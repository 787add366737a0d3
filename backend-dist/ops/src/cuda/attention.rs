//! FlashAttention: selects the kernel of a call and prepares its tensors. Queries, keys and values are read in place,
//! also within a packed projection, and so are their gradients written. The log-sum-exp has the layout of the kernels,
//! `[b, hq, padded queries]` in f32.

use burn::backend::{Cube, DType, FloatDType, TensorMetadata, ops::FloatTensorOps};
use burn_cubecl::kernel::copy_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;
use kernels_cubecl::attention::portable::{self, Element, mma};
use kernels_cubecl::attention::{
    self as hopper, AttentionShape, CallOptions, Dropout, Gradients, Half, Packed, Saved, Tensor4,
};

use super::attention_parts::{arranged_as, parts, whole};
use super::{Float, empty, is_aligned, is_here, launched};
use crate::{
    attention_masks::Bits,
    options::{AttentionDropout, AttentionOptions, PackedHeads},
    plain,
};

/// Strides of the tensors of the tensor-core kernels are multiples of this: 16 bytes.
const VECTOR: usize = 8;

pub fn forward(qkv: [Float; 3], options: AttentionOptions) -> (Float, Float) {
    let Some(call) = Call::of(&qkv, options) else {
        let [q, k, v] = qkv;
        return plain::attention::forward::<Cube>(q, k, v, options);
    };
    call.output(qkv)
}

pub fn grads(qkv: [Float; 3], result: [Float; 2], grad: Float, options: AttentionOptions) -> [Float; 3] {
    let Some(call) = Call::of(&qkv, options) else {
        return plain::attention::grads::<Cube>(qkv, result, grad, options);
    };
    call.gradients(qkv, result, grad)
}

pub fn packed_forward(qkv: Float, heads: PackedHeads, options: AttentionOptions) -> (Float, Float) {
    let Some(call) = Call::of_packed(&qkv, heads, options) else {
        let [q, k, v] = plain::attention::unpack::<Cube>(qkv, heads);
        return plain::attention::forward::<Cube>(q, k, v, options);
    };
    let qkv = call.readable(qkv);
    call.forward(&qkv, parts(&qkv, heads))
}

pub fn packed_grad(
    qkv: Float,
    result: [Float; 2],
    grad: Float,
    heads: PackedHeads,
    options: AttentionOptions,
) -> Float {
    let Some(call) = Call::of_packed(&qkv, heads, options) else {
        let qkv = plain::attention::unpack::<Cube>(qkv, heads);
        return Cube::float_cat(plain::attention::grads::<Cube>(qkv, result, grad, options).into(), 2);
    };
    let qkv = call.readable(qkv);
    let gradient = empty(&qkv, qkv.shape(), qkv.dtype());
    call.backward(parts(&qkv, heads), result, grad, parts(&gradient, heads));
    gradient
}

/// The kernel of a call. Without any of these (f64, a softcap), the formulas of `plain` materialise all scores.
#[derive(Clone, Copy, Debug)]
enum Kernel {
    /// Warpgroup MMA.
    Hopper,
    /// `mma.sync`: other head dimensions in half precision, and other GPUs than Hopper.
    Mma,
    /// Without tensor cores: f32, and head dimensions that are no multiples of 16.
    Portable(Element),
}

/// One kernel call. Forward and backward construct it from the same tensors and options, so they agree on the kernel
/// and on its layout of the log-sum-exp.
pub(super) struct Call {
    kernel: Kernel,
    pub shape: AttentionShape,
    scale: f64,
    extras: CallOptions<'static>,
    starts: Option<DocumentStarts>,
    bits: Bits,
    dtype: DType,
}

/// The starts of packed documents.
pub(super) struct DocumentStarts {
    /// Of queries and of keys, `i32 [documents + 1]` on the device.
    pub handles: [Handle; 2],
    pub documents: usize,
    /// Queries and keys of the longest document.
    pub longest: [usize; 2],
}

impl DocumentStarts {
    fn packed(&self) -> Packed<'_> {
        let ([query_starts, key_starts], [longest_query, longest_key]) = (&self.handles, self.longest);
        Packed { query_starts, key_starts, sequences: self.documents, longest_query, longest_key }
    }
}

impl Call {
    pub fn of([q, k, v]: &[Float; 3], options: AttentionOptions) -> Option<Self> {
        let [from, to] = [q, k].map(|x| x.meta.shape());
        let alike = k.dtype() == q.dtype() && v.dtype() == q.dtype();
        let lengths = [from[3], v.meta.shape()[3]];
        alike.then(|| Self::new(q, [from[0], to[0]], [from[2], to[2]], lengths, options)).flatten()
    }

    fn of_packed(qkv: &Float, PackedHeads { heads, kv_heads }: PackedHeads, options: AttentionOptions) -> Option<Self> {
        let shape = qkv.meta.shape();
        Self::new(qkv, [shape[0]; 2], [heads, kv_heads], [shape[3]; 2], options)
    }

    fn new(
        x: &CubeTensor,
        [queries, keys]: [usize; 2],
        [heads, kv_heads]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
        options: AttentionOptions,
    ) -> Option<Self> {
        let AttentionOptions { scale, causal, window, softcap: None, dropout, deterministic } = options else {
            return None;
        };
        let batch = x.meta.shape()[1];
        let shape = AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal, window };
        let of_whole = |AttentionDropout { p, seed, first_sample, first_head, heads }| Dropout {
            p: p as f32,
            seed,
            first: [first_sample, first_head, 0, 0],
            heads,
            queries,
        };
        let extras = CallOptions { dropout: dropout.map(of_whole), deterministic, ..Default::default() };
        Self::with(x, shape, scale, extras, None)
    }

    /// A call on tensors of the type and device of `x`.
    pub fn with(
        x: &CubeTensor,
        shape: AttentionShape,
        scale: f64,
        extras: CallOptions<'static>,
        starts: Option<DocumentStarts>,
    ) -> Option<Self> {
        let dtype = x.dtype();
        let (element, half) = match dtype {
            DType::F32 => (Element::F32, None),
            DType::BF16 => (Element::Bf16, Some(Half::Bf16)),
            DType::F16 => (Element::F16, Some(Half::F16)),
            _ => return None,
        };
        let extras = CallOptions { element: half.unwrap_or_default(), ..extras };
        let (kernel, bits) = (Kernel::Portable(element), Bits::default());
        let mut call = Self { kernel, shape, scale, extras, starts, bits, dtype };
        call.kernel = match half {
            Some(_) if scale > 0.0 && shape.check(&x.client, &call.extras()).is_ok() => Kernel::Hopper,
            Some(half) if mma::has_kernel(&x.client, half, &shape) => Kernel::Mma,
            _ => Kernel::Portable(element),
        };
        is_here(x).then_some(call)
    }

    /// The call with masks for single scores; `None` if it is not of the one kernel that has those.
    pub fn with_bits(self, bits: impl FnOnce() -> Bits) -> Option<Self> {
        matches!(self.kernel, Kernel::Hopper).then(|| Self { bits: bits(), ..self })
    }

    fn extras(&self) -> CallOptions<'_> {
        let packed = self.starts.as_ref().map(DocumentStarts::packed);
        CallOptions { packed, masks: self.bits.masks(), ..self.extras }
    }

    /// Output and log-sum-exp.
    pub fn output(&self, qkv: [Float; 3]) -> (Float, Float) {
        let [q, k, v] = qkv.map(|x| self.readable(x));
        self.forward(&q, [&q, &k, &v].map(whole))
    }

    /// The gradients of queries, keys and values.
    pub fn gradients(&self, qkv: [Float; 3], result: [Float; 2], grad: Float) -> [Float; 3] {
        let [q, k, v] = qkv.map(|x| self.readable(x));
        let gradients = [&q, &k, &v].map(|x| arranged_as(x, x.meta.shape().dims(), x.dtype()));
        self.backward([&q, &k, &v].map(whole), result, grad, gradients.each_ref().map(whole));
        gradients
    }

    /// `x [s, b, h, d]` in place if the kernel can read its layout, else a copy.
    pub fn readable(&self, x: CubeTensor) -> CubeTensor {
        let (shape, strides) = (x.meta.shape(), x.meta.strides());
        let fits = match self.kernel {
            Kernel::Hopper | Kernel::Mma => {
                let outer = (0..3).all(|i| shape[i] == 1 || (strides[i] > 0 && strides[i].is_multiple_of(VECTOR)));
                outer && is_aligned(&x)
            }
            Kernel::Portable(_) => true,
        };
        if fits && strides[3] == 1 { x } else { copy_contiguous(x) }
    }

    /// Output `[s, b, hq, dv]` and log-sum-exp; `like` is on the device.
    pub fn forward(&self, like: &CubeTensor, [q, k, v]: [Tensor4; 3]) -> (Float, Float) {
        let Self { kernel, shape, scale, dtype, .. } = self;
        let extras = &self.extras();
        let out = arranged_as(like, shape.out_shape(), *dtype);
        let lse = empty(like, [shape.batch, shape.heads, shape.padded_queries()], DType::F32);
        let (qkv, target) = ((&q, &k, &v), whole(&out));
        let done = match kernel {
            Kernel::Hopper => hopper::forward(&like.client, shape, *scale as f32, extras, qkv, &target, &lse.handle),
            Kernel::Mma => mma::forward(&like.client, shape, *scale as f32, extras, qkv, &target, &lse.handle),
            Kernel::Portable(element) => {
                portable::forward(&like.client, *element, shape, *scale, extras, qkv, &target, &lse.handle)
            }
        };
        launched("attention", done);
        (out, lse)
    }

    fn backward(&self, qkv: [Tensor4; 3], [out, lse]: [Float; 2], grad: Float, gradients: [Tensor4; 3]) {
        let (out, grad) = (self.readable(out), self.output_grad(grad));
        self.backward_of(&out, qkv, [whole(&out), whole(&grad)], &lse.handle, gradients);
    }

    /// The output gradient in a layout that the kernels can read.
    pub fn output_grad(&self, grad: Float) -> CubeTensor {
        let is_alike = grad.dtype() == self.dtype;
        self.readable(if is_alike { grad } else { Cube::float_cast(grad, FloatDType::from(self.dtype)) })
    }

    /// Writes the gradients, from the output, its gradient and the log-sum-exp `[b, hq, padded queries]`; `like` is on
    /// the device.
    pub fn backward_of(
        &self,
        like: &CubeTensor,
        [q, k, v]: [Tensor4; 3],
        [out, slope]: [Tensor4; 2],
        lse: &Handle,
        [dq, dk, dv]: [Tensor4; 3],
    ) {
        let Self { kernel, shape, scale, .. } = self;
        let (client, extras) = (&like.client, &self.extras());
        let saved = Saved { q: &q, k: &k, v: &v, out: &out, lse };
        let gradients = Gradients { dq: &dq, dk: &dk, dv: &dv };
        let done = match kernel {
            Kernel::Hopper => hopper::backward(client, shape, *scale as f32, extras, saved, &slope, gradients),
            Kernel::Mma => mma::backward(client, shape, *scale as f32, extras, saved, &slope, gradients),
            Kernel::Portable(element) => {
                portable::backward(client, *element, shape, *scale, extras, saved, &slope, gradients)
            }
        };
        launched("attention gradient", done);
    }
}
