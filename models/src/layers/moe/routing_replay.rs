//! A run whose tokens use the experts that they used in another run, as with Megatron-LM's `RouterReplay`
//! (`megatron/core/transformer/moe/router_replay.py`).
//!
//! The choice of experts jumps: between two that are nearly equally good a rounding decides, and what follows differs
//! by all that two experts differ. Runs that are to differ by rounding alone have to use the same ones.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// Records the experts of every token of a run, or has another run use them. Clones are the same run, on other ranks.
#[derive(Clone, Debug)]
pub struct RoutingReplay {
    record: Arc<Mutex<HashMap<Routed, Vec<u32>>>>,
    /// Tokens that followed, and those of them that would have used other experts; of a recording run nothing.
    followed: Option<Arc<Mutex<[u64; 2]>>>,
}

/// A choice of experts for one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Routed {
    /// Counted over the whole model.
    pub layer: usize,
    pub purpose: Purpose,
    /// Seed of the training step.
    pub step: u64,
    /// Sample of the global batch.
    pub sample: usize,
    /// Position in the sequence.
    pub place: usize,
}

/// What experts are chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    /// To be used.
    Used,
    /// To be counted by a loss that balances them.
    Counted,
}

impl RoutingReplay {
    /// A run that records its choices. Passes without a [`DropoutKey`](crate::layers::DropoutKey) count as the first
    /// samples of step 0.
    pub fn recording() -> Self {
        Self { record: Arc::default(), followed: None }
    }

    /// A run that uses the choices that this one has recorded. Its routers panic for a token that this one has not
    /// routed.
    pub fn following(&self) -> Self {
        Self { record: self.record.clone(), followed: Some(Arc::default()) }
    }

    /// The choices so far that have followed in this process, and those of them that would have been others.
    pub fn followed(&self) -> [u64; 2] {
        self.followed.as_ref().map_or([0, 0], |counts| *counts.lock())
    }

    /// The experts of a token that would use its `own`: these, recorded, or those of the other run.
    pub(super) fn experts(&self, token: Routed, own: Vec<u32>) -> Vec<u32> {
        let mut record = self.record.lock();
        let Some(counts) = &self.followed else {
            record.insert(token, own.clone());
            return own;
        };
        let experts = record.get(&token).unwrap_or_else(|| panic!("{token:?} is not in the run to follow")).clone();
        let mut counts = counts.lock();
        counts[0] += 1;
        counts[1] += u64::from(experts != own);
        experts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(step: u64, place: usize) -> Routed {
        Routed { layer: 1, purpose: Purpose::Used, step, sample: 0, place }
    }

    #[test]
    fn a_run_follows_another() {
        let first = RoutingReplay::recording();
        let of = |run: &RoutingReplay, own: [[u32; 2]; 2]| {
            [0, 1].map(|place| run.experts(token(5, place), own[place].into()))
        };
        assert_eq!(of(&first, [[1, 3], [0, 2]]), [[1, 3], [0, 2]]);
        let second = first.following();
        assert_eq!(of(&second, [[1, 3], [0, 1]]), [[1, 3], [0, 2]]);
        assert_eq!((first.followed(), second.followed()), ([0, 0], [2, 1]));
    }

    #[test]
    #[should_panic(expected = "step: 6, sample: 0, place: 0 } is not in the run to follow")]
    fn what_was_not_recorded_is_not_followed() {
        let first = RoutingReplay::recording();
        first.experts(token(5, 0), vec![1, 3]);
        first.following().experts(token(6, 0), vec![1, 3]);
    }
}
