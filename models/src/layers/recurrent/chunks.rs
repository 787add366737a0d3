//! Positions in chunks, and how much of a state stays from one position to another of its chunk.

use burn::tensor::{Bool, Tensor};

use super::borders::Borders;

/// Positions of a chunk.
const CHUNK: usize = 64;

/// A sequence in chunks, of which the last one is padded.
#[derive(Clone, Copy, Debug)]
pub(in crate::layers) struct Chunks {
    /// Positions of the sequence.
    pub seq: usize,
    /// Positions of a chunk.
    pub size: usize,
    /// Number of chunks.
    pub count: usize,
}

impl Chunks {
    /// Those of a sequence of `seq` positions.
    pub fn of(seq: usize) -> Self {
        let size = CHUNK.min(seq.next_power_of_two());
        Self { seq, size, count: seq.div_ceil(size) }
    }

    /// `[b, h, s, d]` as `[b, h, chunks, chunk, d]`. Positions that pad are zeros, which change no state.
    pub fn split(self, x: Tensor<4>) -> Tensor<5> {
        let [b, h, _, features] = x.dims();
        let padding = self.count * self.size - self.seq;
        let zeros = || Tensor::zeros([b, h, padding, features], (&x.device(), x.dtype()));
        let x = if padding > 0 { Tensor::cat(vec![x.clone(), zeros()], 2) } else { x };
        x.reshape([b, h, self.count, self.size, features])
    }

    /// The positions of the sequence in `[b, h, chunks, chunk, d]`, as `[b, h, s, d]`.
    pub fn join(self, x: Tensor<5>) -> Tensor<4> {
        let [b, h, _, _, features] = x.dims();
        x.reshape([b, h, self.count * self.size, features]).narrow(2, 0, self.seq)
    }
}

/// Shares of a state that stay.
pub(in crate::layers) struct Decays {
    /// From behind a position (last dimension) to behind another one of its chunk, `[b, h, chunks, chunk, chunk]`; zero
    /// from a later one, and from another document.
    pub between: Tensor<5>,
    /// From in front of the chunk to behind a position, `[b, h, chunks, chunk]`; zero if a document begins between.
    pub since: Tensor<4>,
}

impl Decays {
    /// Of the logarithms of the shares that stay at each position, `[b, h, s]`. No exponential is taken of a positive
    /// number.
    pub fn new(logarithms: Tensor<3>, chunks: Chunks, borders: Option<&Borders>) -> Self {
        let (device, dtype, chunk) = (logarithms.device(), logarithms.dtype(), chunks.size);
        let since = chunks.split(logarithms.unsqueeze_dim(3)).squeeze_dim::<4>(4).cumsum(3);
        let [b, h, n, _] = since.dims();
        let shape = [b, h, n, chunk, chunk];
        let between =
            since.clone().unsqueeze_dim::<5>(4).expand(shape) - since.clone().unsqueeze_dim::<5>(3).expand(shape);
        let later = Tensor::<2, Bool>::tril_mask([chunk, chunk], 0, &device).unsqueeze::<5>().expand(shape);
        let mut between = between.mask_fill(later, f32::NEG_INFINITY);
        let mut since = since.exp();
        if let Some(borders) = borders {
            between = between.mask_fill(borders.divides(chunk, &device).expand(shape), f32::NEG_INFINITY);
            since = since * borders.enters(chunk, (&device, dtype));
        }
        Self { between: between.exp(), since }
    }
}
