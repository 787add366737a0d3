//! Why a plain Burn module cannot compute from the tensors that it is given.

use thiserror::Error;

/// Why a tensor cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum InputError {
    /// It is not there.
    #[error("tensor `{name}` is missing; there are: {present}")]
    Missing {
        /// Its name.
        name: String,
        /// Names of those that are.
        present: String,
    },
    /// It has other dimensions.
    #[error("tensor `{name}` has shape {found:?}; legal: {legal}")]
    Shape {
        /// Its name.
        name: String,
        /// Its shape.
        found: Vec<usize>,
        /// What it may be.
        legal: String,
    },
    /// It has floats and should have whole numbers, or the other way round.
    #[error("tensor `{name}` has {found}; legal: {legal}")]
    Kind {
        /// Its name.
        name: String,
        /// What it has.
        found: &'static str,
        /// What it may have.
        legal: &'static str,
    },
    /// A number is out of range.
    #[error("tensor `{name}` has {value} at {index:?}; legal: {legal}")]
    Value {
        /// The tensor's name.
        name: String,
        /// The number.
        value: i64,
        /// Where it is.
        index: Vec<usize>,
        /// What it may be.
        legal: String,
    },
    /// There are too many or too few of a token.
    #[error("tensor `{name}` has {found} times token {token}; legal: {legal}")]
    Count {
        /// The tensor's name.
        name: String,
        /// The token.
        token: usize,
        /// How often it is there.
        found: usize,
        /// How often it may be.
        legal: String,
    },
    /// No label counts.
    #[error("every label of `{name}`{but} is -100: there is nothing to predict")]
    NothingToPredict {
        /// The tensor of labels.
        name: String,
        /// Those that are never predicted.
        but: &'static str,
    },
    /// The model would pass over it.
    #[error("tensor `{name}` is none that this model takes; legal: {legal}")]
    Unknown {
        /// Its name.
        name: String,
        /// Names of those that the model takes.
        legal: String,
    },
}
