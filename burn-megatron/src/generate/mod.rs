//! Text from a trained model, token by token: the prompt is read once, then every new token alone, with the keys and
//! values of all earlier ones cached.

mod choice;
mod choose;
mod device;
mod error;
mod module;
mod options;
mod ranks;
mod rules;
mod run;
mod sampling;
#[cfg(test)]
mod tests;
mod text;
mod texts;

pub(crate) use choice::{Choice, Chosen};
pub use choice::{Likely, TokenLogprobs};
pub(crate) use choose::choose;
pub use error::GenerateError;
pub(crate) use error::NoChoice;
pub(crate) use module::write_by;
pub use module::{ModulePrompt, generate_module, module_images};
pub use options::GenerateOptions;
pub(crate) use ranks::ModelRanks;
pub(crate) use rules::TextRules;
pub(crate) use run::generate_by;
pub use run::{Generated, generate, generate_batch};
pub(crate) use sampling::PENALTIES;
pub use sampling::Sampling;
pub use text::TextStream;
pub use texts::Ended;
