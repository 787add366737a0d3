//! Which part of a data set a rank reads.

use std::ops::Range;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;

/// Refuses so few training items that [`equal_shares`] are empty.
pub(super) fn enough(items: usize, ranks: usize) -> Result<(), String> {
    if items >= ranks {
        return Ok(());
    }
    let nearest = if items > 0 { format!("{items} data-parallel ranks, or ") } else { String::new() };
    Err(format!(
        "the training set has {items} items, and each of {ranks} data-parallel ranks trains on an equal share; nearest legal: \
         {nearest}{ranks} items"
    ))
}

/// `ranks` contiguous ranges of the same length; the last `items % ranks` items are in none of them.
pub(super) fn equal_shares(items: usize, ranks: usize) -> Vec<Range<usize>> {
    let share = items / ranks;
    (0..ranks).map(|rank| rank * share..(rank + 1) * share).collect()
}

/// `ranks` contiguous ranges that cover all items; lengths differ by at most one.
pub(super) fn whole_shares(items: usize, ranks: usize) -> Vec<Range<usize>> {
    (0..ranks).map(|rank| rank * items / ranks..(rank + 1) * items / ranks).collect()
}

/// [`whole_shares`] for the first `of` of `ranks` ranks, and nothing for the others.
pub(super) fn shares_of_first(items: usize, of: usize, ranks: usize) -> Vec<Range<usize>> {
    let nothing = std::iter::repeat_n(items..items, ranks - of);
    whole_shares(items, of).into_iter().chain(nothing).collect()
}

/// The parts of a loader that have these items.
pub(super) fn split<I>(loader: &Arc<dyn DataLoader<I>>, shares: Vec<Range<usize>>) -> Vec<Arc<dyn DataLoader<I>>> {
    shares.into_iter().map(|share| loader.slice(share.start, share.end)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn equal_shares_are_equal_adjacent_and_leave_out_less_than_one_item_per_rank(items in 0usize..500, ranks in 1usize..9) {
            let shares = equal_shares(items, ranks);
            prop_assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start && pair[0].len() == pair[1].len()));
            prop_assert!(items - shares[ranks - 1].end < ranks);
        }

        #[test]
        fn whole_shares_cover_everything_once_and_evenly(items in 0usize..500, ranks in 1usize..9) {
            let shares = whole_shares(items, ranks);
            prop_assert_eq!((shares[0].start, shares[ranks - 1].end), (0, items));
            prop_assert!(shares.windows(2).all(|pair| pair[0].end == pair[1].start));
            prop_assert!(shares.iter().all(|share| share.len() == items / ranks || share.len() == items / ranks + 1));
        }
    }
}
