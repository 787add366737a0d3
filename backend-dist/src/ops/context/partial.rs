//! Attention over keys that come one after the other, and the sums of its gradients.

use burn::backend::{FloatDType, Scalar, Shape, TensorMetadata, tensor::FloatTensor};

use super::kernels::{ContextKernels, Qkv, Seen, Whole, cast, joined, wide};
use super::plan::Piece;

/// The result over the keys seen so far.
pub(super) struct Partial<B: ContextKernels> {
    seen: Option<Seen<B>>,
    /// Queries, samples, heads, length of a value.
    shape: [usize; 4],
}

impl<B: ContextKernels> Partial<B> {
    pub fn new([q, _, v]: &Qkv<B>) -> Self {
        let (q, v) = (q.shape(), v.shape());
        Self { seen: None, shape: [q[0], q[1], q[2], v[3]] }
    }

    /// Takes in the keys of `pieces`.
    pub fn add(&mut self, qkv: &Qkv<B>, pieces: &[Piece], whole: &Whole) {
        if self.seen.is_none() && self.are_tiles(pieces) {
            let (outs, lses) = pieces.iter().map(|piece| B::piece_forward(qkv, piece, whole).into()).unzip();
            self.seen = Some([joined::<B>(outs, 0), joined::<B>(lses, 2)]);
            return;
        }
        for piece in pieces {
            let part = B::piece_forward(qkv, piece, whole);
            let [out, lse] = self.seen.take().unwrap_or_else(|| self.nothing(&qkv[0]));
            let inner = wide(out.dtype());
            let sum = [cast::<B>(out, inner), cast::<B>(lse, inner)];
            self.seen = Some(B::merge(sum, part, piece));
        }
    }

    /// Output in the type of `q`, and log-sum-exp.
    pub fn finish(mut self, q: &FloatTensor<B>) -> Seen<B> {
        let [out, lse] = self.seen.take().unwrap_or_else(|| self.nothing(q));
        [cast::<B>(out, q.dtype()), lse]
    }

    /// Whether every row is in one of the pieces, in their order.
    fn are_tiles(&self, pieces: &[Piece]) -> bool {
        let [rows, samples, ..] = self.shape;
        let mut next = 0;
        let follows = pieces.iter().all(|piece| {
            let fits = piece.queries.start == next && piece.samples == (0..samples);
            next = piece.queries.end;
            fits
        });
        follows && next == rows
    }

    /// No key seen.
    fn nothing(&self, like: &FloatTensor<B>) -> Seen<B> {
        let [rows, samples, heads, _] = self.shape;
        let (shape, dtype) = (Shape::from([samples, heads, rows]), FloatDType::from(wide(like.dtype())));
        let lse = B::float_full(shape, Scalar::Float(f64::NEG_INFINITY), &like.device(), dtype);
        [B::zeros(like, Shape::from(self.shape)), lse]
    }
}

/// What the gradients of pieces are made of.
pub(super) struct Slope<'a, B: ContextKernels> {
    pub seen: &'a Seen<B>,
    pub grad: &'a FloatTensor<B>,
    pub whole: &'a Whole,
}

impl<B: ContextKernels> Slope<'_, B> {
    /// `sums` with the gradients of `pieces` added: of all queries, and of the keys and values at hand.
    pub fn add(&self, mut sums: Qkv<B>, qkv: &Qkv<B>, pieces: &[Piece]) -> Qkv<B> {
        for piece in pieces {
            let parts = B::piece_grads(qkv, self.seen, self.grad, piece, self.whole);
            let rows = [&piece.queries, &piece.keys, &piece.keys];
            let mut parts = parts.into_iter().zip(rows);
            sums = sums.map(|sum| {
                let (part, rows) = parts.next().expect("a gradient for each sum");
                B::add_rows(sum, part, rows, &piece.samples)
            });
        }
        sums
    }
}

/// Zeros of the shape of `x`, to be added to.
pub(super) fn empty_sum<B: ContextKernels>(x: &FloatTensor<B>) -> FloatTensor<B> {
    B::zeros(x, x.shape())
}
