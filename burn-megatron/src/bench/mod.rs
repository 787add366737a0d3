//! `burn-megatron bench`: how fast the real engine trains, in one table.
//!
//! A [`recipe`] or a file describes the run; [`measure`] trains it step by step as `train` does, with the same
//! engine, host communication and reading of batches, but without dashboard, evaluation and checkpoints. [`Record`] is
//! the result, with everything that is needed to repeat the measurement.

pub mod chart;
mod documents;
mod measure;
mod origin;
pub mod profile;
mod random;
pub mod recipe;
mod record;
mod synthetic;
mod table;
#[cfg(test)]
mod tests;

pub use documents::{DocumentLengths, DocumentReport};
pub use measure::{Measured, Timing, measure};
pub use origin::Origin;
pub use record::{Device, Distribution, Memory, Record, Run, Setup};
pub use synthetic::SyntheticTokens;
pub use table::{announcement, markdown, text, together};
