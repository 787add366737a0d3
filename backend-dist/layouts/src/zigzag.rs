//! Which positions of a sequence a rank has under context parallelism.

use std::ops::Range;

/// The positions of rank `rank` of `size` ranks with `count` positions each. The sequence is split into `2 size`
/// chunks. A rank has one chunk counted from the front and the same one counted from the end, so that all ranks have
/// the same work under a causal mask (`get_batch_on_this_cp_rank` in `megatron/core/utils.py`).
///
/// # Panics
/// If `count` is odd and there are several ranks.
pub fn zigzag(rank: usize, size: usize, count: usize) -> [Range<usize>; 2] {
    assert!(
        size == 1 || count.is_multiple_of(2),
        "context parallel: {count} positions a rank cannot be split into two chunks"
    );
    let first = count / 2;
    let chunk = |index: usize, length: usize| index..index + length;
    match size {
        1 => [0..first, first..count],
        _ => [chunk(rank * first, first), chunk((2 * size - 1 - rank) * first, first)],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_rank_has_the_first_and_the_last_chunk() {
        assert_eq!([zigzag(0, 2, 4), zigzag(1, 2, 4)], [[0..2, 6..8], [2..4, 4..6]]);
        assert_eq!(zigzag(0, 1, 5), [0..2, 2..5]);
    }

    proptest! {
        #[test]
        fn every_position_has_one_rank(size in 1usize..9, half in 1usize..6) {
            let mut all: Vec<usize> = (0..size).flat_map(|rank| zigzag(rank, size, 2 * half)).flatten().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..2 * half * size).collect::<Vec<_>>());
        }
    }
}
