//! Repeats a recorded training run of Megatron-Core in any layout and compares every step.

mod files;
mod layouts;
mod oracle;
mod recipe;
mod run;

pub use files::FileError;
pub use layouts::layouts;
pub use oracle::{Oracle, OracleModel, OracleStep, OracleTraining};
pub use recipe::{RecipeError, model};
pub use run::{Replay, ReplayError, ReplayStep, Tolerances, WeightDifference, replay};
