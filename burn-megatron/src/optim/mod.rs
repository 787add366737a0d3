//! The optimizer: AdamW with Megatron's rules, gradient buffers, and the global-norm clip.

mod adamw;
mod clip;
mod device;
mod host;
mod optimizer;
mod plan;
mod real;
mod store;
#[cfg(test)]
mod tests;

pub use adamw::{AdamWConfig, Coefficients, update};
pub use clip::clip_factor;
pub use device::DeviceStore;
pub use host::HostStore;
pub use optimizer::{OptimError, Optimizer};
pub use plan::{BucketPlan, Slot};
pub use real::Real;
pub use store::{GradStore, State};
