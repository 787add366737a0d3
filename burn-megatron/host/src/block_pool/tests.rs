use proptest::prelude::*;

use super::*;

const BLOCK: usize = 2;

/// Sequences over a pool, and what a cache would hold: of every block the model and all tokens up to its last written one.
struct Cache {
    pool: BlockPool,
    written: Vec<(usize, Vec<i64>)>,
    sequences: Vec<Sequence>,
}

struct Sequence {
    model: usize,
    tokens: Vec<i64>,
    blocks: Vec<u32>,
    kept: usize,
}

impl Cache {
    fn new(num_blocks: usize, shares: bool) -> Self {
        let pool = BlockPool::new(num_blocks, BLOCK, shares);
        Self { pool, written: vec![(0, Vec::new()); num_blocks], sequences: Vec::new() }
    }

    /// Begins a sequence if there is room; the number of its tokens that were found.
    fn begin(&mut self, model: usize, tokens: Vec<i64>) -> Option<usize> {
        let found = self.pool.find(model, &tokens);
        assert!(found.len() * BLOCK < tokens.len(), "the last token is computed");
        let new = tokens.len().div_ceil(BLOCK) - found.len();
        if new + self.pool.idle_among(&found) > self.pool.available() {
            return None;
        }
        self.pool.share(&found);
        let cached = found.len() * BLOCK;
        let blocks = [found, self.pool.take(new).expect("there is room")].concat();
        self.sequences.push(Sequence { model, tokens, blocks, kept: 0 });
        self.write(self.sequences.len() - 1, cached);
        Some(cached)
    }

    /// Writes a sequence's tokens from `first` on, and keeps its full blocks.
    fn write(&mut self, at: usize, first: usize) {
        let Sequence { model, tokens, blocks, kept } = &mut self.sequences[at];
        for end in first + 1..=tokens.len() {
            self.written[blocks[(end - 1) / BLOCK] as usize] = (*model, tokens[..end].to_vec());
        }
        self.pool.keep((*model, tokens), blocks, kept);
    }

    /// One more token, if there is room.
    fn append(&mut self, at: usize, token: i64) {
        let sequence = &mut self.sequences[at];
        let first = sequence.tokens.len();
        if first == sequence.blocks.len() * BLOCK {
            let Some(blocks) = self.pool.take(1) else { return };
            sequence.blocks.extend(blocks);
        }
        sequence.tokens.push(token);
        self.write(at, first);
    }

    fn end(&mut self, at: usize) {
        let sequence = self.sequences.swap_remove(at);
        self.pool.give_back(&sequence.blocks);
    }

    fn check(&self) {
        let pool = &self.pool;
        for (index, block) in pool.blocks.iter().enumerate() {
            let index = index as u32;
            let uses = self.sequences.iter().filter(|sequence| sequence.blocks.contains(&index)).count();
            assert_eq!(block.sequences, uses, "block {index}");
            let lists = [pool.free.contains(&index), pool.idle.get(&block.idle_since) == Some(&index), uses > 0];
            assert_eq!(
                lists.iter().filter(|is| **is).count(),
                1,
                "block {index} is free, idle or somebody's: {lists:?}"
            );
            assert!(!(lists[0] && block.content.is_some()) && (!lists[1] || block.content.is_some()));
            let Some((_, content)) = &block.content else { continue };
            assert_eq!(pool.known[content], index, "a content has one block");
            if let Before::Content(number) = content.before {
                let before = pool.blocks.iter().find(|of| of.content.as_ref().is_some_and(|of| of.0 == number));
                let before = before.expect("the block before is given away later");
                assert!(block.sequences <= before.sequences);
                assert!(before.sequences > 0 || block.idle_since < before.idle_since);
            }
        }
        let contents = pool.blocks.iter().filter(|block| block.content.is_some()).count();
        assert_eq!((contents, pool.free.len() + pool.idle.len()), (pool.known.len(), pool.available()));
        // What a sequence reads is what it would have written itself.
        for Sequence { model, tokens, blocks, .. } in &self.sequences {
            for (index, block) in blocks.iter().enumerate() {
                let end = tokens.len().min((index + 1) * BLOCK);
                assert_eq!(
                    self.written[*block as usize],
                    (*model, tokens[..end].to_vec()),
                    "block {index} of {tokens:?}"
                );
            }
        }
    }
}

proptest! {
    /// Few different tokens, so that most sequences have beginnings in common, and few blocks, so that most are given away.
    #[test]
    fn blocks_are_shared_by_equal_tokens_alone(
        num_blocks in 1..12usize,
        shares in prop::bool::weighted(0.9),
        moves in prop::collection::vec((0..4u8, 0..2usize, prop::collection::vec(0..2i64, 1..9), any::<prop::sample::Index>()), 1..120),
    ) {
        let mut cache = Cache::new(num_blocks, shares);
        for (kind, model, tokens, index) in moves {
            let at = (!cache.sequences.is_empty()).then(|| index.index(cache.sequences.len()));
            match (kind, at) {
                (0 | 1, _) => drop(cache.begin(model, tokens)),
                (2, Some(at)) => tokens.into_iter().for_each(|token| cache.append(at, token)),
                (_, Some(at)) => cache.end(at),
                (_, None) => {}
            }
            cache.check();
        }
        while !cache.sequences.is_empty() {
            cache.end(0);
            cache.check();
        }
        prop_assert_eq!(cache.pool.available(), num_blocks);
        prop_assert!(cache.pool.take(num_blocks).is_some() && cache.pool.known.is_empty());
    }

    /// With room for all, every full block of what was read before is found, whoever has ended.
    #[test]
    fn what_was_read_is_found_while_there_is_room(
        prompts in prop::collection::vec((0..2usize, prop::collection::vec(0..2i64, 1..9), any::<bool>()), 1..12),
    ) {
        let mut cache = Cache::new(12 * 4, true);
        let mut before: Vec<(usize, Vec<i64>)> = Vec::new();
        for (model, tokens, ends) in prompts {
            let common = |other: &[i64]| tokens.iter().zip(other).take_while(|(a, b)| a == b).count();
            let most = before.iter().filter(|of| of.0 == model).map(|of| common(&of.1) / BLOCK).max().unwrap_or(0);
            let cached = most.min((tokens.len() - 1) / BLOCK) * BLOCK;
            prop_assert_eq!(cache.begin(model, tokens.clone()), Some(cached));
            before.push((model, tokens));
            if ends {
                cache.end(cache.sequences.len() - 1);
            }
            cache.check();
        }
    }
}

#[test]
fn the_end_of_the_longest_idle_sequence_is_given_away_first() {
    let mut cache = Cache::new(6, true);
    cache.begin(0, vec![1, 1, 2, 2, 3, 3]);
    cache.begin(0, vec![4, 4, 5, 5]);
    cache.end(0);
    cache.end(0);
    let found = |cache: &Cache| [&[1, 1, 2, 2, 3, 3, 0][..], &[4, 4, 5, 5, 0]].map(|of| cache.pool.find(0, of).len());
    assert_eq!(found(&cache), [3, 2]);
    // One block is free; then the last one of the first sequence goes.
    cache.begin(1, vec![0; 4]);
    assert_eq!(found(&cache), [2, 2]);
    // What is read again is no longer the oldest, so the end of the second goes for the token behind it.
    cache.begin(0, vec![1, 1, 2, 2, 9]);
    assert_eq!(found(&cache), [2, 1]);
    cache.end(1);
    cache.begin(1, vec![7; 2]);
    assert_eq!(found(&cache), [2, 1], "the block of token 9 was free");
    cache.begin(1, vec![8; 2]);
    assert_eq!(found(&cache), [2, 0]);
    cache.check();
}
