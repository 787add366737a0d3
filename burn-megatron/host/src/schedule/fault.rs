//! What can be wrong with a schedule.

use thiserror::Error;

use super::Action;

/// What is wrong with a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the fields are the values in the messages")]
pub enum Fault {
    /// A pass or a transfer is nowhere in the list of its rank.
    #[error("rank {rank} never does: {action}")]
    Missing { rank: usize, action: Action },
    /// It is there twice, or does not belong to this schedule.
    #[error("rank {rank} must not do, or not once more: {action}")]
    Unexpected { rank: usize, action: Action },
    /// It is listed before something it needs.
    #[error("rank {rank} does too early: {action}")]
    TooEarly { rank: usize, action: Action },
    /// Between two ranks, the receives are not in the order of the sends.
    #[error("rank {from} sends to rank {to} in another order than rank {to} receives, from transfer {index} on")]
    Unmatched { from: usize, to: usize, index: usize },
    /// Every rank waits for another, if sends block.
    #[error("deadlock: {}", waiting.iter().map(|(rank, action)| format!("rank {rank} waits at: {action}"))
        .collect::<Vec<_>>().join("; "))]
    Deadlock { waiting: Vec<(usize, Action)> },
}
