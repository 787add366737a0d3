//! Text from a trained model, token by token: the prompt is read once, then every new token alone, with the keys and
//! values of all earlier ones cached.

mod error;
mod run;
mod sampling;
#[cfg(test)]
mod tests;
mod text;

pub use error::GenerateError;
pub use run::{Ended, GenerateOptions, Generated, generate, generate_batch};
pub use sampling::Sampling;
pub use text::TextStream;
