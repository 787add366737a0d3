//! Logits, loss and gradients of a model on given tokens, in any layout: what another program is compared with.

mod error;
mod files;
mod loss;
mod module;
mod preference;
mod run;
mod settings;

pub use error::ForwardError;
pub use files::{read_input, write_output};
pub(crate) use module::read_module;
pub use module::{ModuleOutputs, forward_module, read_module_inputs, write_module_outputs};
pub use preference::{Preference, PreferenceOutput, preference, read_preference, write_preference};
pub use run::forward;
pub(crate) use run::{build, build_over, check_layout};
pub use settings::{Input, Output, Settings};
