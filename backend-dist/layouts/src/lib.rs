//! Layouts of parallel training: which ranks belong together, and which slice of which tensor a rank holds. Pure
//! arithmetic, without tensors, threads of ranks and Burn. Next to them is what operations and plans of them must agree
//! on: [`recompute`], [`gpu_model`], [`sizes`].
//!
//! ```
//! use layouts::mesh::{Axis, Mesh};
//! use layouts::shard::{GroupPosition, Section};
//!
//! let mesh = Mesh::new("TP2 DP2".parse()?)?;
//! assert_eq!(mesh.groups(Axis::Dp), [[0, 2], [1, 3]]);
//! // Rank 3 is the second of its tensor-parallel group.
//! let section = Section::split("w", &[6, 4], 0, 2, GroupPosition { rank: 1, size: 2 });
//! assert_eq!(section.ranges(), [3..6, 0..4]);
//! # Ok::<(), layouts::mesh::LayoutError>(())
//! ```

pub mod element;
#[doc(hidden)]
pub mod gemm_split;
pub mod gpu_model;
pub mod matrix_owners;
pub mod mesh;
pub mod pattern;
pub mod recompute;
pub mod shard;
pub mod sizes;
mod zigzag;

pub use zigzag::zigzag;
