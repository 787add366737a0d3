//! What most programs need: `use burn_megatron::prelude::*;`

pub use backend_dist::mesh::{Mesh, ParallelLayout};

pub use crate::console::renderer;
pub use crate::learner::MegatronStrategy;
