//! Logits, loss and gradients of a model on given tokens, in any layout: what another program is compared with.

mod dpo;
mod error;
mod files;
mod loss;
mod run;

pub use dpo::{Preference, PreferenceOutput, dpo, read_preference, write_preference};
pub use error::ForwardError;
pub use files::{read_input, write_output};
pub use run::{Input, Output, Settings, forward};
