//! CubeCL kernels for transformer training: FlashAttention, memory-bound kernels, grouped GEMMs, FP8 casts, random
//! numbers. They work on buffers and sizes and know neither tensors nor ranks. Without the feature `cuda` the crate has
//! only the parts that need no GPU, such as random numbers that are the same on the host and on every GPU:
//!
//! ```
//! use kernels_cubecl::random::{standard_normal, words};
//!
//! // Element `index` of stream 2 is a function of the seed and the index alone.
//! let normal = |index| standard_normal(words(1234, 2, index));
//! let mean = (0..10_000).map(normal).sum::<f64>() / 1e4;
//! assert!(mean.abs() < 0.05);
//! ```
//!
//! A kernel is a function of a client, sizes and buffers. This one runs on CubeCL's cpu runtime (feature `cpu`);
//! `attention::forward` is its counterpart for Hopper GPUs:
//!
//! ```no_run
//! # #[cfg(feature = "cpu")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use kernels_cubecl::attention::portable::{self, Element};
//! use kernels_cubecl::attention::{AttentionShape, CallOptions, Tensor4};
//!
//! let client = cubecl::Device::Cpu(Default::default()).client();
//! let (batch, heads, kv_heads, queries, keys, head_dim, value_dim) = (1, 1, 1, 3, 3, 2, 2);
//! let causal = true;
//! let shape =
//!     AttentionShape { batch, heads, kv_heads, queries, keys, head_dim, value_dim, causal, window: None };
//! let tensor = |values: [f32; 6]| {
//!     let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
//!     Tensor4::contiguous(client.create_from_slice(&bytes), [3, 1, 1, 2])
//! };
//! let (q, k) = (tensor([0.0; 6]), tensor([1.0; 6]));
//! let v = tensor([0.0, 0.0, 1.0, 2.0, 2.0, 4.0]);
//! let (out, lse) = (tensor([0.0; 6]), client.empty(4 * shape.statistics_len()));
//! let options = CallOptions::default();
//! portable::forward(&client, Element::F32, &shape, 1.0, &options, (&q, &k, &v), &out, &lse)?;
//!
//! // All scores are equal: query i gets the mean of the values up to i.
//! let bytes = client.read_one_unchecked(out.handle);
//! let out: Vec<f32> = bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect();
//! let expected = [0.0, 0.0, 0.5, 1.0, 1.0, 2.0];
//! assert!(out.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{out:?}");
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "cpu"))]
//! # fn main() {}
//! ```
#![warn(missing_docs)]
// Kernels are written in CubeCL's subset of Rust: it has no `div_ceil` or `is_multiple_of`, comptime conditions are
// separate from those at run time, and its macros expand to items without documentation.
#![allow(clippy::manual_div_ceil, clippy::manual_is_multiple_of)]
#![cfg_attr(feature = "cuda", allow(missing_docs, clippy::assign_op_pattern, clippy::collapsible_if))]
// A kernel gets its buffers and sizes one by one.
#![allow(clippy::too_many_arguments)]

/// Launches a kernel of elements of these types with its client, cubes, units of a cube, and perhaps the width of vectors;
/// then its buffers; its numbers; and what it is compiled for.
#[cfg(feature = "cuda")]
macro_rules! launch_kernel {
    ($($kernel:ident)::+ $(<$($element:ty),+>)?, $($($argument:expr),+ $(,)?);+) => {
        $($kernel)::+::launch_unchecked$(::<$($element),+>)?($($($argument),+),+)
    };
}

pub mod blockwise;
pub mod decode;
pub mod fp8;
pub mod fused;
pub mod grouped;
pub mod narrow;
pub mod random;
pub mod tiling;

#[cfg(feature = "cuda")]
pub mod attention;
#[cfg(feature = "cuda")]
pub mod hopper;
#[cfg(feature = "cuda")]
pub mod pointwise;
