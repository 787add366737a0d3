//! Kernels bound by memory: one pass over their tensors, 16 bytes a unit and access.
#![allow(missing_docs, reason = "the launch macros write public items without documentation")]

pub mod accumulate;
pub mod adamw;
pub mod column_sum;
pub mod cross_entropy;
pub mod dropout;
pub mod embedding;
pub mod flat;
pub mod gelu;
pub mod layer_norm;
pub mod rms_norm;
pub mod rope;
pub mod swiglu;

use cubecl::prelude::*;

/// Units of a cube.
pub const UNITS: u32 = 256;

/// Eight numbers: 16 bytes of a half precision type.
pub type Vec8<E> = Vector<E, Const<8>>;
/// 16 bytes of fp32.
pub type F32x4 = Vector<f32, Const<4>>;

/// Why a call was refused. Nothing has been launched then.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PointwiseError {
    /// A row length the kernels do not handle.
    #[error("{what} of length {found}: it must be a multiple of {multiple} and at most {most}")]
    Length {
        /// Which dimension.
        what: &'static str,
        /// Its length.
        found: usize,
        /// What must divide it.
        multiple: usize,
        /// The longest.
        most: usize,
    },
    /// A buffer of another size.
    #[error("the buffer of {name} has {found} bytes, {expected} are needed")]
    Buffer {
        /// Which tensor.
        name: &'static str,
        /// Its bytes.
        found: u64,
        /// The bytes needed.
        expected: u64,
    },
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

/// Numbers of shared memory that [`cube_sums`] uses.
const SCRATCH: usize = 4 * UNITS as usize / 32;

/// The sums of `a` and of `b` over all units of the cube, the same in all of them. Calls in a row alternate `turn`
/// between 0 and 1, so that a call needs to meet the cube only once.
#[cube]
fn cube_sums(a: f32, b: f32, scratch: &mut Shared<[f32]>, turn: u32) -> (f32, f32) {
    let planes = comptime![UNITS as usize / 32];
    let at = turn as usize * comptime![2 * planes];
    let (a, b) = (plane_sum(a), plane_sum(b));
    if UNIT_POS % 32 == 0 {
        scratch[at + (UNIT_POS / 32) as usize] = a;
        scratch[at + planes + (UNIT_POS / 32) as usize] = b;
    }
    sync_cube();
    let mut a = 0.0f32;
    let mut b = 0.0f32;
    #[unroll]
    for i in 0..planes {
        a += scratch[at + i];
        b += scratch[at + planes + i];
    }
    (a, b)
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
