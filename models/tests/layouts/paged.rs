//! Sequences that are read together, a few tokens of each at a time, give the logits of reading each alone.

use models::layers::paged::{Chunk, Outputs, Step};
use models::{CausalLm, PagedKvCache};

use crate::harness::{BATCH, Batch, SEQ, assert_close, host};

/// Positions of a block. It divides neither [`SEQ`] nor any of the chunks.
const BLOCK: usize = 3;

/// Tokens that each sequence reads in each step, in turn: prompts in one chunk and in two, single tokens, nothing. In
/// some steps single tokens come first, in some they stand between longer chunks.
const READS: [[usize; 8]; 2] = [[5, 1, 1, 0, 4, 1, 1, 3], [0, 3, 4, 1, 1, 1, 1, 5]];

/// `full` are the logits of [`Batch`], `[BATCH, SEQ, vocab]`.
pub fn assert_neighbours_change_nothing<M: CausalLm>(what: &str, model: &M, batch: &Batch, full: &[f64], vocab: usize) {
    let blocks = SEQ.div_ceil(BLOCK);
    let mut cache = PagedKvCache::new(BATCH * blocks, BLOCK);
    for round in 0..2 {
        // In the second round other sequences have the blocks, with what was written there before.
        let block = |sequence: usize, index: usize| match round {
            0 => (index * BATCH + sequence) as u32,
            _ => (BATCH * blocks - 1 - (index * BATCH + sequence)) as u32,
        };
        let mut read = [0; BATCH];
        for step in 0..READS[0].len() {
            let (mut chunks, mut expected) = (Vec::new(), Vec::new());
            for sequence in (0..BATCH).map(|index| (index + step) % BATCH) {
                let first = read[sequence];
                let end = first + READS[sequence % READS.len()][step];
                if end == first {
                    continue;
                }
                read[sequence] = end;
                let outputs = [Outputs::Last, Outputs::All][(step + sequence) % 2];
                let wanted = if outputs == Outputs::All { first..end } else { end - 1..end };
                expected.extend_from_slice(&full[(sequence * SEQ + wanted.start) * vocab..][..wanted.len() * vocab]);
                chunks.push(Chunk {
                    tokens: batch.tokens[sequence * SEQ..][first..end].to_vec(),
                    positions: first..end,
                    blocks: (0..end.div_ceil(BLOCK)).map(|index| block(sequence, index)).collect(),
                    outputs,
                });
            }
            let found = host(model.extend(&Step::new(chunks), &mut cache));
            assert_close(&format!("{what}, round {round}: paged logits of step {step}"), &found, &expected, 1e-12);
        }
        assert_eq!(read, [SEQ; BATCH]);
    }
}
