//! What one new token of each of several sequences sees. Numbers alone.

use super::Chunk;

/// Positions of several sequences, padded to the same number.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct View {
    /// Of each sequence.
    pub positions: usize,
    /// Place in the cache of each position, by sequence; beyond the cache where nothing is seen.
    pub slots: Vec<i64>,
    /// Whether the position is seen.
    pub seen: Vec<bool>,
}

impl View {
    /// What the last token of each chunk sees: the last `window` positions of its sequence, or all.
    ///
    /// The number of positions is a multiple of the block size, so that the shapes of a decoder change once a block.
    pub fn of_last_positions(chunks: &[Chunk], window: Option<usize>, num_blocks: usize, block_size: usize) -> Self {
        let seen_of = |chunk: &Chunk| {
            let end = chunk.positions.end;
            end - end.min(window.unwrap_or(usize::MAX))..end
        };
        let most = chunks.iter().map(|chunk| seen_of(chunk).len()).max().unwrap_or(0);
        let positions = most.next_multiple_of(block_size);
        let nowhere = (num_blocks * block_size) as i64;
        let (mut slots, mut seen) = (Vec::new(), Vec::new());
        for chunk in chunks {
            let range = seen_of(chunk);
            let padding = positions - range.len();
            seen.extend(range.clone().map(|_| true).chain((0..padding).map(|_| false)));
            slots.extend(chunk.slots(range, block_size).chain((0..padding).map(|_| nowhere)));
        }
        Self { positions, slots, seen }
    }
}

/// The blocks of the sequence that has most.
pub(super) fn most_blocks(chunks: &[Chunk]) -> usize {
    chunks.iter().map(|chunk| chunk.blocks.len()).max().unwrap_or(0)
}

/// The blocks of each sequence, padded to `max_blocks`, one after the other.
pub(super) fn block_table(chunks: &[Chunk], max_blocks: usize) -> Vec<i32> {
    let padded = |chunk: &Chunk| {
        let blocks: Vec<i32> = chunk.blocks.iter().map(|block| *block as i32).collect();
        blocks.into_iter().chain(std::iter::repeat(0)).take(max_blocks)
    };
    chunks.iter().flat_map(padded).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::paged::Outputs;

    fn chunk(end: usize, blocks: &[u32]) -> Chunk {
        Chunk { tokens: vec![0], positions: end - 1..end, blocks: blocks.to_vec(), outputs: Outputs::Last }
    }

    #[test]
    fn each_sequence_sees_its_own_positions() {
        let chunks = [chunk(3, &[4, 1]), chunk(1, &[0])];
        let view = View::of_last_positions(&chunks, None, 5, 2);
        assert_eq!(view.positions, 4);
        assert_eq!(view.slots, [8, 9, 2, 10, 0, 10, 10, 10]);
        assert_eq!(view.seen, [true, true, true, false, true, false, false, false]);
    }

    #[test]
    fn a_window_sees_the_last_positions() {
        let view = View::of_last_positions(&[chunk(5, &[3, 2, 0])], Some(2), 5, 2);
        assert_eq!((view.positions, view.slots, view.seen), (2, vec![5, 0], vec![true, true]));
    }
}
