//! Why a plain Burn module cannot compute from the tensors that it is given.

use thiserror::Error;

/// Why a tensor cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum InputError {
    /// It is not there.
    #[error("tensor `{name}` is missing; there are: {present}")]
    Missing { name: String, present: String },
    /// It has other dimensions.
    #[error("tensor `{name}` has shape {found:?}; legal: {legal}")]
    Shape { name: String, found: Vec<usize>, legal: String },
    /// It has floats and should have whole numbers, or the other way round.
    #[error("tensor `{name}` has {found}; legal: {legal}")]
    Kind { name: String, found: &'static str, legal: &'static str },
    /// A number is out of range.
    #[error("tensor `{name}` has {value} at {index:?}; legal: {legal}")]
    Value { name: String, value: i64, index: Vec<usize>, legal: String },
    /// There are too many or too few of a token.
    #[error("tensor `{name}` has {found} times token {token}; legal: {legal}")]
    Count { name: String, token: usize, found: usize, legal: String },
    /// No label counts.
    #[error("every label of `{name}`{but} is -100: there is nothing to predict")]
    NothingToPredict { name: String, but: &'static str },
    /// The model would pass over it.
    #[error("tensor `{name}` is none that this model takes; legal: {legal}")]
    Unknown { name: String, legal: String },
}
