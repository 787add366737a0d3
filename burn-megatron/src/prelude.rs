//! What most programs need: `use burn_megatron::prelude::*;`

pub use backend_dist::launch::{BoxError, Rank};
pub use backend_dist::mesh::{Mesh, ParallelLayout};
pub use models::{CausalLm, Gpt, GptConfig, Llama, LlamaConfig, ModelConfig, ParamBuilder};

pub use crate::console::renderer;
pub use crate::engine::{EngineConfig, LossMean};
pub use crate::generate::{GenerateOptions, Sampling, generate};
pub use crate::learner::{MegatronStrategy, Pretraining, global_weights, loss_over, save_weights};
pub use crate::lr::{LrConfig, LrDecay, Span};
pub use crate::optim::AdamWConfig;
