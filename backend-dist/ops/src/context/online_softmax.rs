//! Attention over blocks of keys with a running softmax, and the sums of its gradients.

use burn::backend::{FloatDType, Scalar, Shape, TensorMetadata, tensor::FloatTensor};

use super::kernels::{ContextKernels, OutputLse, Qkv, SequenceOptions, concat};
use super::plan::ScoreBlock;
use crate::dtype::{cast, wide};

/// Output and log-sum-exp over the keys so far.
pub(super) struct OnlineSoftmax<B: ContextKernels> {
    out_lse: Option<OutputLse<B>>,
    /// Queries, samples, heads, features of a value.
    shape: [usize; 4],
}

impl<B: ContextKernels> OnlineSoftmax<B> {
    pub fn new([q, _, v]: &Qkv<B>) -> Self {
        let (q, v) = (q.shape(), v.shape());
        Self { out_lse: None, shape: [q[0], q[1], q[2], v[3]] }
    }

    /// Adds the keys of `blocks`.
    pub fn add(&mut self, qkv: &Qkv<B>, blocks: &[ScoreBlock], sequence: &SequenceOptions) {
        if self.out_lse.is_none() && self.are_tiles(blocks) {
            let (outs, lses) = blocks.iter().map(|block| B::block_forward(qkv, block, sequence).into()).unzip();
            self.out_lse = Some([concat::<B>(outs, 0), concat::<B>(lses, 2)]);
            return;
        }
        for block in blocks {
            let part = B::block_forward(qkv, block, sequence);
            let [out, lse] = self.out_lse.take().unwrap_or_else(|| self.no_keys(&qkv[0]));
            let inner = wide(out.dtype());
            let sum = [cast::<B>(out, inner), cast::<B>(lse, inner)];
            self.out_lse = Some(B::merge(sum, part, block));
        }
    }

    /// Output in the type of `q`, and log-sum-exp.
    pub fn finish(mut self, q: &FloatTensor<B>) -> OutputLse<B> {
        let [out, lse] = self.out_lse.take().unwrap_or_else(|| self.no_keys(q));
        [cast::<B>(out, q.dtype()), lse]
    }

    /// Whether the blocks cover all positions, in order.
    fn are_tiles(&self, blocks: &[ScoreBlock]) -> bool {
        let [rows, samples, ..] = self.shape;
        let mut next = 0;
        let follows = blocks.iter().all(|block| {
            let fits = block.queries.start == next && block.samples == (0..samples);
            next = block.queries.end;
            fits
        });
        follows && next == rows
    }

    /// Output and log-sum-exp of no keys.
    fn no_keys(&self, like: &FloatTensor<B>) -> OutputLse<B> {
        let [rows, samples, heads, _] = self.shape;
        let (shape, dtype) = (Shape::from([samples, heads, rows]), FloatDType::from(wide(like.dtype())));
        let lse = B::float_full(shape, Scalar::Float(f64::NEG_INFINITY), &like.device(), dtype);
        [B::zeros(like, Shape::from(self.shape)), lse]
    }
}

/// The inputs of the blocks' gradients.
pub(super) struct BackwardInputs<'a, B: ContextKernels> {
    pub out_lse: &'a OutputLse<B>,
    pub grad: &'a FloatTensor<B>,
    pub sequence: &'a SequenceOptions,
}

impl<B: ContextKernels> BackwardInputs<'_, B> {
    /// `sums` with the gradients of `blocks` added: of all queries, and of the keys and values of this step.
    pub fn add(&self, mut sums: Qkv<B>, qkv: &Qkv<B>, blocks: &[ScoreBlock]) -> Qkv<B> {
        for block in blocks {
            let parts = B::block_grads(qkv, self.out_lse, self.grad, block, self.sequence);
            let rows = [&block.queries, &block.keys, &block.keys];
            let mut parts = parts.into_iter().zip(rows);
            sums = sums.map(|sum| {
                let (part, rows) = parts.next().expect("a gradient for each sum");
                B::add_rows(sum, part, rows, &block.samples)
            });
        }
        sums
    }
}

/// A gradient sum of zeros with the shape of `x`.
pub(super) fn zero_sum<B: ContextKernels>(x: &FloatTensor<B>) -> FloatTensor<B> {
    B::zeros(x, x.shape())
}
