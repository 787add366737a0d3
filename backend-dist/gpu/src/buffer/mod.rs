//! Flat arrays in GPU memory that are allocated once, written in place, and read as ordinary tensors.
//!
//! Writes are queued on the compute stream of the rank's thread, like every tensor operation. The tensor of
//! [`Buffer::tensor`] shares the memory and shows later writes. Other devices have no buffers: [`Buffer::zeros`]
//! returns `None`.

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
mod none;

#[cfg(feature = "cuda")]
pub use cuda::{
    Buffer, ChunkTable, RangeTable, TensorTable, adamw, encode_blocks, join_masters, momentum, muon_mix, muon_step,
    split_masters, squares,
};
#[cfg(not(feature = "cuda"))]
pub use none::{
    Buffer, ChunkTable, RangeTable, TensorTable, adamw, encode_blocks, join_masters, momentum, muon_mix, muon_step,
    split_masters, squares,
};

pub use kernels_cubecl::narrow::dynamic::{BLOCK, Map};
pub use kernels_cubecl::narrow::{Place, join, round, split};

use burn::tensor::{DType, Device};
use std::ops::Range;

/// Alignment of tensors in a [`Buffer`], in elements; at least 512 bytes of any type, as CubeCL's operations on views
/// require.
pub const ALIGNMENT: usize = 256;

/// The coefficients of an AdamW step with decoupled weight decay, as in `torch.optim.AdamW`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWStep {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment after bias correction.
    pub eps: f64,
    /// `lr / (1 − beta1ᵗ)`
    pub step_size: f64,
    /// `1 / √(1 − beta2ᵗ)`
    pub root_scale: f64,
    /// `1 − lr · weight_decay`, for tensors with weight decay.
    pub keep: f64,
    /// Multiplies every gradient: averaging and clipping.
    pub grad_scale: f64,
    /// Number of the step: moments in `bf16` are rounded with random bits that depend on it.
    pub step: u32,
}

/// Where the parameters of an [`adamw`] step are kept.
#[derive(Clone, Copy, Debug)]
pub enum Parameters<'a> {
    /// In `f32` only.
    Wide(&'a Buffer),
    /// In `f32`, and rounded to the model's type.
    Master {
        /// The parameters in `f32`.
        master: &'a Buffer,
        /// The same in the model's type, `bf16` or `f16`.
        weight: &'a Buffer,
    },
    /// In `bf16` with remainders ([`split`]).
    Split {
        /// The parameters in `bf16`.
        weight: &'a Buffer,
        /// What `f32` has and `bf16` has not; 16 bits each, whose type says nothing.
        remainder: &'a Buffer,
    },
}

/// A moment in 8 bits ([`Map`]).
#[derive(Clone, Debug)]
pub struct Blocks {
    /// Two codes in each `bf16` number, whose type says nothing.
    pub codes: Buffer,
    /// An `f32` number for each [`BLOCK`].
    pub scales: Buffer,
}

impl Blocks {
    /// `len` zeros, a multiple of [`BLOCK`]; `None` where the device has no buffers.
    pub fn zeros(len: usize, device: &Device) -> Option<Self> {
        let codes = Buffer::zeros(len / 2, device, DType::BF16)?;
        Some(Self { codes, scales: Buffer::zeros(len / BLOCK, device, DType::F32)? })
    }
}

/// How the moments of an [`adamw`] step are kept.
#[derive(Clone, Copy, Debug)]
pub enum Moments<'a> {
    /// First and second moment in `f32` or `bf16`.
    Floats(&'a Buffer, &'a Buffer),
    /// First moment by [`Map::Signed`], second by [`Map::Unsigned`].
    Blocks(&'a Blocks, &'a Blocks),
}

/// The equally long buffers of one [`adamw`] step.
#[derive(Clone, Copy, Debug)]
pub struct AdamWBuffers<'a> {
    /// The parameters.
    pub parameters: Parameters<'a>,
    /// Both moments.
    pub moments: Moments<'a>,
    /// Gradient sums in `f32` or `bf16`.
    pub grad: &'a Buffer,
    /// The ends of the tensors, which have weight decay, and their places in global tensors.
    pub tensors: &'a TensorTable,
}

/// How the momentum and the step are computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MomentumRule {
    /// SGD without momentum: `step = g`.
    Plain,
    /// SGD: `m ← momentum m + g`, `step = m`.
    Sum {
        /// The momentum coefficient.
        momentum: f64,
    },
    /// SGD: `m ← momentum m + g`, `step = g + momentum m` with the new `m`.
    Nesterov {
        /// The momentum coefficient.
        momentum: f64,
    },
    /// Lion: `step = sign(beta1 m + (1 − beta1) g)`, then `m ← beta2 m + (1 − beta2) g`.
    Lion {
        /// Weight of the momentum in the sign.
        beta1: f64,
        /// Decay of the momentum.
        beta2: f64,
    },
}

/// `p ← keep p − lr step`, where `keep` is 1 for tensors without weight decay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MomentumStep {
    /// The rule.
    pub rule: MomentumRule,
    /// Learning rate.
    pub lr: f64,
    /// `1 − lr · weight_decay`, for tensors with weight decay.
    pub keep: f64,
    /// Multiplies every gradient: averaging and clipping.
    pub grad_scale: f64,
}

/// The equally long buffers of one [`momentum`] step.
#[derive(Clone, Copy, Debug)]
pub struct MomentumBuffers<'a> {
    /// Parameters in `f32`.
    pub master: &'a Buffer,
    /// Momentum in `f32`, unless the rule is [`MomentumRule::Plain`].
    pub momentum: Option<&'a Buffer>,
    /// Gradient sums in `f32`.
    pub grad: &'a Buffer,
    /// The parameters in the model's type, if that is `bf16` or `f16`.
    pub weight: Option<&'a Buffer>,
    /// The ends of the tensors, and which have weight decay.
    pub tensors: &'a TensorTable,
}

/// Splits ranges into chunks of at most `most` elements: their starts and lengths, and the number of chunks of each
/// range.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "only GPUs work in chunks"))]
fn chunks(ranges: &[Range<usize>], most: usize) -> (Vec<u32>, Vec<u32>, Vec<usize>) {
    let (mut starts, mut lens, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    for range in ranges {
        let before = starts.len();
        for start in range.clone().step_by(most) {
            starts.push(start as u32);
            lens.push((range.end - start).min(most) as u32);
        }
        counts.push(starts.len() - before);
    }
    (starts, lens, counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_each_range_on_its_own() {
        let (starts, lens, counts) = chunks(&[3..10, 10..10, 12..16], 4);
        assert_eq!((starts, lens, counts), (vec![3, 7, 12], vec![4, 3, 4], vec![2, 0, 1]));
    }
}
