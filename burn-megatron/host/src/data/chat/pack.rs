//! Best-fit packing of samples into sequences.

use std::collections::BTreeMap;

/// Puts samples of these lengths into sequences of `capacity` tokens: the longest first, each where the least remains
/// (best-fit decreasing; Ding et al., "Fewer Truncations Improve Language Modeling", 2024). The result has the indices
/// of the samples of each sequence, and depends on the lengths only.
///
/// # Panics
/// If a sample is longer than a sequence.
pub fn pack(lengths: &[usize], capacity: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&sample| std::cmp::Reverse(lengths[sample]));
    let mut sequences: Vec<Vec<usize>> = Vec::new();
    // Sequences by the room that remains in them.
    let mut open: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    for sample in order {
        let length = lengths[sample];
        assert!(length <= capacity, "a sample of {length} tokens in a sequence of {capacity}");
        let room = open.range(length..).next().map(|(room, _)| *room);
        let (sequence, left) = match room {
            Some(room) => {
                let same = open.get_mut(&room).expect("a sequence with this room");
                let sequence = same.pop().expect("no list is empty");
                if same.is_empty() {
                    open.remove(&room);
                }
                sequences[sequence].push(sample);
                (sequence, room - length)
            }
            None => {
                sequences.push(vec![sample]);
                (sequences.len() - 1, capacity - length)
            }
        };
        if left > 0 {
            open.entry(left).or_default().push(sequence);
        }
    }
    sequences
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn each_sample_goes_where_the_least_remains() {
        assert_eq!(pack(&[5, 3, 7, 2, 3], 10), [vec![2, 1], vec![0, 4, 3]]);
        assert_eq!(pack(&[], 10), Vec::<Vec<usize>>::new());
    }

    proptest! {
        #[test]
        fn every_sample_is_once_in_a_sequence_that_it_fits(lengths in prop::collection::vec(1usize..=64, 0..200)) {
            let sequences = pack(&lengths, 64);
            let mut all: Vec<usize> = sequences.concat();
            all.sort_unstable();
            prop_assert_eq!(all, (0..lengths.len()).collect::<Vec<_>>());
            let filled = |sequence: &Vec<usize>| sequence.iter().map(|&sample| lengths[sample]).sum::<usize>();
            prop_assert!(sequences.iter().all(|sequence| filled(sequence) <= 64));
            // No two sequences could be one.
            let mut sums: Vec<usize> = sequences.iter().map(filled).collect();
            sums.sort_unstable();
            prop_assert!(sums.len() < 2 || sums[0] + sums[1] > 64);
        }
    }
}
