//! What most programs need: `use burn_megatron::prelude::*;`

pub use backend_dist::fully_shard::{FullyShard, Units, fully_shard};
pub use backend_dist::fused_adamw::FusedAdamW;
pub use backend_dist::gradients::{average_gradients, clip_grad_norm};
pub use backend_dist::launch::{BoxError, Rank, launch};
pub use backend_dist::logical::Placement;
pub use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
pub use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute, Teams, explain};
pub use backend_dist::parallelize::{Plan, PlanError, parallelize};
pub use models::{
    Bert, BertConfig, CausalLm, FamilyConfig, Gpt, GptConfig, Llama, LlamaConfig, ModelConfig, ParamBuilder, Recompute,
};

pub use crate::checkpoint::{Checkpoint, SaveEvery, SaverOptions};
pub use crate::console::renderer;
pub use crate::engine::{AnomalyAction, AnomalyConfig, EngineConfig, LossMean};
pub use crate::generate::{GenerateOptions, Sampling, generate};
pub use crate::learner::{
    Activation, CheckpointOptions, Description, ExitOptions, Faults, LogOptions, MegatronStrategy, MeshStrategy,
    OnHost, Part, Pretraining, ProcessesStrategy, RestartOptions, Resume, Sendable, Stages, StagesStrategy,
    global_weights, loss_over,
};
pub use crate::lr::{LrConfig, LrDecay, Span};
pub use crate::optim::{AdamWConfig, OptimizerConfig};
pub use crate::plan_module::{ModulePlan, ModuleRun, plan_module};
pub use crate::schedule::ScheduleKind;
pub use crate::verify_module::{
    ModuleError, ModuleReport, Proof, verify_module, verify_module_as, verify_stages, verify_stages_as,
};
