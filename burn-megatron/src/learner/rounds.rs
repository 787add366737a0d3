//! Rounds of batches: which data-parallel ranks have one, and how far all are.

use backend_dist::comm::Group;
use backend_dist::launch::BoxError;
use burn::data::dataloader::{DataLoaderIterator, Progress};
use burn::train::Interrupter;

/// What the ranks know of a round of batches before they work on it, the same on every rank.
pub(super) struct Round {
    /// Which ranks have a batch.
    pub ready: Vec<bool>,
    pub stop: bool,
    /// Items of all ranks, with those of this round.
    pub progress: Progress,
}

/// Takes this rank's next batch and lets the others know; no rank starts a batch that another will not join.
pub(super) fn next<B>(
    batches: &mut dyn DataLoaderIterator<B>,
    group: &Group,
    interrupter: &Interrupter,
) -> Result<(Option<B>, Round), BoxError> {
    let batch = batches.next().transpose()?;
    let progress = aggregate(group, batches.progress());
    let ranks = group.all_gather_host((batch.is_some(), interrupter.should_stop()));
    let round =
        Round { ready: ranks.iter().map(|rank| rank.0).collect(), stop: ranks.iter().any(|rank| rank.1), progress };
    Ok((batch, round))
}

pub(super) fn aggregate(group: &Group, progress: Progress) -> Progress {
    let plain = (progress.items_processed, progress.total, progress.unit);
    let ranks = group.all_gather_host(plain).into_iter();
    Progress::aggregate(ranks.map(|(done, total, unit)| Progress::new(done, total, unit)))
}

pub(super) fn uneven(ready: &[bool], iteration: usize) -> String {
    let list = |wanted: bool| {
        let ranks = ready.iter().enumerate().filter(|(_, ready)| **ready == wanted).map(|(rank, _)| rank.to_string());
        ranks.collect::<Vec<_>>().join(", ")
    };
    format!(
        "ranks {} have no batch {iteration} while ranks {} do: every share of the training loader must yield the same number of \
         batches",
        list(false),
        list(true)
    )
}

#[cfg(test)]
mod tests {
    use super::uneven;

    #[test]
    fn an_uneven_loader_names_the_ranks() {
        let text = uneven(&[true, false, true], 4);
        assert!(text.starts_with("ranks 1 have no batch 4 while ranks 0, 2 do"), "{text}");
    }
}
