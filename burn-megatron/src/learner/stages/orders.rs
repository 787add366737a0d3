//! What the first rank of a pipeline and the others tell each other.

use burn::tensor::Bytes;
use serde::{Deserialize, Serialize};

use super::values::Values;

/// What the first rank tells another.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Order<I> {
    Seed(u64, usize),
    Train(Vec<I>),
    Step,
    AverageStates,
    BeginEvaluation,
    Evaluate(I),
    /// Send what you save.
    Save,
    /// Send the values that you save.
    Values,
    End,
}

impl<I> Order<I> {
    /// The same with other batches.
    pub fn map<J>(self, of: impl Fn(I) -> J) -> Order<J> {
        match self {
            Self::Seed(base, epoch) => Order::Seed(base, epoch),
            Self::Train(batches) => Order::Train(batches.into_iter().map(of).collect()),
            Self::Step => Order::Step,
            Self::AverageStates => Order::AverageStates,
            Self::BeginEvaluation => Order::BeginEvaluation,
            Self::Evaluate(batch) => Order::Evaluate(of(batch)),
            Self::Save => Order::Save,
            Self::Values => Order::Values,
            Self::End => Order::End,
        }
    }
}

/// What another rank tells the first.
#[derive(Clone, Serialize, Deserialize)]
pub(super) enum Reply<O> {
    Outputs(Vec<O>),
    Saved(Values, Bytes),
    Values(Values),
}

impl<O> Reply<O> {
    /// The same with other outputs.
    pub fn map<P>(self, of: impl Fn(O) -> P) -> Reply<P> {
        match self {
            Self::Outputs(outputs) => Reply::Outputs(outputs.into_iter().map(of).collect()),
            Self::Saved(values, states) => Reply::Saved(values, states),
            Self::Values(values) => Reply::Values(values),
        }
    }
}
