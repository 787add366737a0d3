//! A run whose tokens use the experts that they used in another run, as with Megatron-LM's `RouterReplay`
//! (`megatron/core/transformer/moe/router_replay.py`).
//!
//! The choice of experts jumps: between two that are nearly equally good a rounding decides, and what follows differs
//! by all that two experts differ. Runs that are to differ by rounding alone have to use the same ones.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::select::Choice;

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

    /// The share of the choices so far that would have been others; 0 where nothing followed.
    pub fn rerouted(&self) -> f64 {
        let [all, others] = self.followed.as_ref().map_or([0, 0], |counts| *lock(counts));
        others as f64 / all.max(1) as f64
    }

    /// Records `choice`, whose first tokens are `tokens`, or replaces it.
    pub(super) fn of(&self, mut choice: Choice, tokens: impl Iterator<Item = Routed>) -> Choice {
        let mut record = lock(&self.record);
        for (token, routed) in tokens.enumerate() {
            let own = || choice.of(token).map(|expert| expert as u32).collect::<Vec<_>>();
            let Some(counts) = &self.followed else {
                let own = own();
                record.insert(routed, own);
                continue;
            };
            let experts = record.get(&routed).unwrap_or_else(|| panic!("{routed:?} is not in the run to follow"));
            let mut counts = lock(counts);
            counts[0] += 1;
            counts[1] += u64::from(*experts != own());
            choice.set(token, experts.iter().map(|expert| *expert as usize));
        }
        choice
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(experts: [[usize; 2]; 2]) -> Choice {
        let mut choice = Choice::none(2, 2);
        experts.into_iter().enumerate().for_each(|(token, experts)| choice.set(token, experts));
        choice
    }

    fn tokens(step: u64) -> impl Iterator<Item = Routed> {
        (0..2).map(move |place| Routed { layer: 1, purpose: Purpose::Used, step, sample: 0, place })
    }

    #[test]
    fn a_run_follows_another() {
        let first = RoutingReplay::recording();
        assert_eq!(first.of(choice([[3, 1], [0, 2]]), tokens(5)), choice([[1, 3], [0, 2]]));
        let second = first.following();
        assert_eq!(second.of(choice([[3, 1], [0, 1]]), tokens(5)), choice([[1, 3], [0, 2]]));
        assert_eq!((first.rerouted(), second.rerouted()), (0.0, 0.5));
    }

    #[test]
    #[should_panic(expected = "step: 6, sample: 0, place: 0 } is not in the run to follow")]
    fn what_was_not_recorded_is_not_followed() {
        let first = RoutingReplay::recording();
        first.of(choice([[3, 1], [0, 2]]), tokens(5));
        first.following().of(choice([[3, 1], [0, 2]]), tokens(6));
    }
}
