//! The optimizer: main gradients, their sums over ranks, ZeRO, and the update rules, with Megatron's defaults.
//!
//! [`Optimizer`] works on buckets of parameters. `layout` says what lies where in a bucket, `flat` holds and moves the
//! numbers, `grads` sums them up, `rule` and `muon` change them, `saving` slices them for checkpoints.

mod adamw;
mod average;
mod blocks;
mod box_runs;
mod bucket;
mod check;
mod clip;
mod config;
mod flat;
mod gpu;
mod grads;
mod host;
mod layout;
mod lion;
mod modules;
mod muon;
mod optimizer;
mod real;
mod restoring;
mod rule;
mod saving;
mod scaler;
mod sgd;
mod sharding;
mod slices;
mod states;
mod step_info;
#[cfg(test)]
mod tests;
mod weight_buffers;

pub use adamw::AdamWConfig;
pub use check::OptimError;
pub use clip::clip_factor;
pub use config::OptimizerConfig;
pub use layout::{BucketSpec, ParamScale};
pub use lion::LionConfig;
pub use muon::{MuonConfig, MuonScale};
pub use optimizer::{Memory, Optimizer};
pub use restoring::ReadBox;
pub use scaler::{LossScale, LossScaler, LossScalerConfig};
pub use sgd::SgdConfig;
pub use sharding::Sharding;
pub use states::{MainParamsDtype, StateDtype, StateDtypes};
pub use step_info::StepInfo;
