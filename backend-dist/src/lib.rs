//! Device meshes, ranks, collectives and sharded tensors for Burn.

pub mod mesh;
