//! Memory-bound kernels: one pass over their tensors, 16 bytes per unit and access.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

pub mod accumulate;
pub mod activation;
pub mod adamw;
pub mod adamw_blocks;
pub mod column_sum;
pub mod columns;
pub mod convolution;
pub mod cross_entropy;
mod cube;
pub mod dropout;
pub mod embedding;
pub mod flat;
pub mod gated;
pub mod gated_delta;
pub mod gated_norm;
pub mod head_norms;
pub mod latent;
pub mod low_rank;
pub mod low_rank_gradients;
pub mod low_rank_swiglu;
pub mod moe;
pub mod momentum;
pub mod muon;
pub mod norm;
pub mod normalize;
pub mod partial_sums;
pub mod reduce_slices;
pub mod remainder;
pub mod rope;
mod sigmoid;
pub mod sinks;
pub mod small_matrix;
pub mod split_bf16;
pub mod ssd;
pub mod strided_rows;

pub use cube::CubeShape;
pub(crate) use cube::{UNITS, cube_max, cube_sums, plane_greatest, plane_total};
use cubecl::prelude::*;
pub(crate) use rope::turn;

/// Most items of a kernel with a unit for each, for 32-bit positions.
const MOST: usize = u32::MAX as usize - 4 * CubeShape::GPU.units as usize;

/// Eight numbers: 16 bytes of a half precision type.
pub type Vec8<E> = Vector<E, Const<8>>;
/// 16 bytes of fp32.
pub type F32x4 = Vector<f32, Const<4>>;

/// Why a call was refused. Nothing has been launched then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum PointwiseError {
    /// A row length the kernels do not handle.
    #[error("{what} of length {found}: it must be a multiple of {multiple} and at most {most}")]
    Length { what: &'static str, found: usize, multiple: usize, most: usize },
    /// A shape without a kernel.
    #[error("there is no kernel for {shape}")]
    Shape { shape: String },
    /// A buffer that is too small.
    #[error("the buffer of {name} has {found} bytes, {expected} are needed")]
    Buffer { name: &'static str, found: u64, expected: u64 },
    /// A buffer of a type that the kernel does not handle.
    #[error("{name} is {found:?}; it must be F32 or Bf16")]
    Float { name: &'static str, found: flat::FloatType },
}

/// `handle` as a buffer of `len` items of `bytes` bytes each.
pub(crate) fn buffer(
    name: &'static str,
    handle: &cubecl::server::Handle,
    len: usize,
    bytes: usize,
) -> Result<BufferArg, PointwiseError> {
    let (found, expected) = (handle.size_in_used(), (len * bytes) as u64);
    if found < expected {
        return Err(PointwiseError::Buffer { name, found, expected });
    }
    // SAFETY: the buffer is long enough.
    Ok(unsafe { BufferArg::from_raw_parts(handle.clone(), len) })
}

pub(crate) fn check(what: &'static str, found: usize, multiple: usize, most: usize) -> Result<(), PointwiseError> {
    if found == 0 || !found.is_multiple_of(multiple) || found > most {
        return Err(PointwiseError::Length { what, found, multiple, most });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_that_do_not_fill_vectors_are_refused() {
        assert_eq!(check("rows", 4096, 8, 16384), Ok(()));
        for found in [0, 4100, 16392] {
            let refused = PointwiseError::Length { what: "rows", found, multiple: 8, most: 16384 };
            assert_eq!(check("rows", found, 8, 16384), Err(refused));
        }
    }
}
