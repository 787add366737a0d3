use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

fn config(max_num_seqs: usize, num_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        max_num_seqs,
        max_num_batched_tokens: 8,
        max_model_len: 12,
        block_size: 3,
        num_blocks,
        enable_prefix_caching: true,
        enforce_eager: false,
    }
}

/// Tokens that no sequence of another id has.
fn add(scheduler: &mut Scheduler, id: u64, len: usize) {
    let tokens: Vec<i64> = (0..len).map(|at| id as i64 * 100 + at as i64).collect();
    scheduler.add(id, 0, &tokens);
}

fn ranges(step: &[Scheduled]) -> Vec<(u64, Range<usize>)> {
    step.iter().map(|scheduled| (scheduled.id, scheduled.positions.clone())).collect()
}

#[test]
fn prompts_share_the_tokens_of_a_step() {
    let mut scheduler = Scheduler::new(config(2, 20)).unwrap();
    [(1, 5), (2, 5), (3, 1)].into_iter().for_each(|(id, len)| add(&mut scheduler, id, len));
    let step = scheduler.schedule();
    assert_eq!(ranges(&step), [(1, 0..5), (2, 0..3)]);
    assert_eq!([step[0].is_last, step[1].is_last], [true, false]);
    scheduler.append(1, 0);
    // Single tokens come first; the third sequence waits for a place.
    assert_eq!(ranges(&scheduler.schedule()), [(1, 5..6), (2, 3..5)]);
    [1, 2].into_iter().for_each(|id| scheduler.append(id, 0));
    scheduler.remove(1);
    assert_eq!(ranges(&scheduler.schedule()), [(2, 5..6), (3, 0..1)]);
}

#[test]
fn the_youngest_gives_its_blocks_up_and_is_read_again() {
    let config = SchedulerConfig { enable_prefix_caching: false, ..config(4, 4) };
    let mut scheduler = Scheduler::new(config).unwrap();
    [(1, 5), (2, 2)].into_iter().for_each(|(id, len)| add(&mut scheduler, id, len));
    assert_eq!(ranges(&scheduler.schedule()), [(1, 0..5), (2, 0..2)]);
    [1, 2].into_iter().for_each(|id| scheduler.append(id, 0));
    assert_eq!(ranges(&scheduler.schedule()), [(1, 5..6), (2, 2..3)]);
    [1, 2].into_iter().for_each(|id| scheduler.append(id, 0));
    // The third block of the first is the last one.
    assert_eq!(ranges(&scheduler.schedule()), [(1, 6..7)]);
    assert_eq!((scheduler.free_blocks(), scheduler.waiting(), scheduler.preemptions()), (1, 1, 1));
    assert!(scheduler.schedule().is_empty(), "the first has no new token, the second no room");
    scheduler.remove(1);
    assert_eq!(ranges(&scheduler.schedule()), [(2, 0..4)]);
}

#[test]
fn sizes_that_cannot_serve_are_named() {
    let refuse = |config: SchedulerConfig| config.check().unwrap_err().to_string();
    let good = config(4, 4);
    assert_eq!(good.check(), Ok(()));
    assert_eq!(
        refuse(SchedulerConfig { max_num_seqs: 0, ..good }),
        "max-num-seqs 0: at least one is needed; nearest legal: 1"
    );
    assert!(refuse(SchedulerConfig { max_num_batched_tokens: 3, ..good }).ends_with("nearest legal: 4"));
    assert!(refuse(SchedulerConfig { num_blocks: 3, ..good }).starts_with("max-model-len 12: the cache has no blocks"));
    assert!(refuse(SchedulerConfig { max_model_len: 1, ..good }).ends_with("nearest legal: 2"));
}

/// What a caller does with a scheduler: all sequences end after their number of new tokens, some are cancelled.
struct Driver {
    scheduler: Scheduler,
    sequences: BTreeMap<u64, Followed>,
    /// What a cache would hold: of every block the model and all tokens up to its last written one.
    written: Vec<(usize, Vec<i64>)>,
    /// Tokens that were not read.
    found: usize,
}

struct Followed {
    model: usize,
    tokens: Vec<i64>,
    /// Tokens read or found since the sequence last started.
    read: usize,
    /// Tokens at its end.
    end: usize,
}

impl Driver {
    fn step(&mut self) {
        let config = *self.scheduler.config();
        let preempted = self.scheduler.preemptions();
        let step = self.scheduler.schedule();
        let tokens: usize = step.iter().map(|scheduled| scheduled.positions.len()).sum();
        assert!(tokens <= config.max_num_batched_tokens && self.scheduler.running() <= config.max_num_seqs);
        let taken = self.scheduler.running.iter().flat_map(|sequence| sequence.blocks.clone());
        let taken: BTreeSet<u32> = taken.collect();
        assert_eq!(taken.len() + self.scheduler.free_blocks(), config.num_blocks, "each block is free or somebody's");
        assert!(step.is_sorted_by_key(|scheduled| scheduled.positions.len() > 1));
        assert!(!step.is_empty() || self.sequences.is_empty(), "sequences wait and nothing is read");
        // All is written before anything is read, unless all read one token: then what is found was written before.
        let single = step.iter().all(|scheduled| scheduled.positions.len() == 1);
        let before = self.written.clone();
        for Scheduled { id, positions, blocks, .. } in &step {
            let Followed { model, tokens, .. } = &self.sequences[id];
            for end in positions.start + 1..=positions.end {
                self.written[blocks[(end - 1) / config.block_size] as usize] = (*model, tokens[..end].to_vec());
            }
        }
        for Scheduled { id, positions, blocks, is_last } in step {
            let Followed { model, tokens, read, end } = self.sequences.get_mut(&id).unwrap();
            // Each position once and in order, unless the sequence starts, or starts anew behind what is found.
            if positions.start != *read {
                assert!(*read == 0 || preempted > 0, "{positions:?} after {read}");
                assert!(positions.start.is_multiple_of(config.block_size));
                self.found += positions.start;
            }
            assert!(blocks.len() * config.block_size >= positions.end);
            assert_eq!(is_last, positions.end == tokens.len());
            for (index, block) in blocks.iter().enumerate().take(positions.end.div_ceil(config.block_size)) {
                let filled = positions.end.min((index + 1) * config.block_size);
                let holds = if single && filled <= positions.start { &before } else { &self.written };
                assert_eq!(holds[*block as usize], (*model, tokens[..filled].to_vec()), "block {index} of {id}");
            }
            *read = positions.end;
            if is_last && tokens.len() + 1 >= *end {
                self.scheduler.remove(id);
                self.sequences.remove(&id);
            } else if is_last {
                // Two sequences with the same tokens say the same.
                let token = tokens.iter().sum::<i64>() % 2;
                tokens.push(token);
                self.scheduler.append(id, token);
            }
        }
    }
}

proptest! {
    /// Few different tokens, so that sequences have beginnings in common.
    #[test]
    fn every_sequence_ends_and_reads_its_own_tokens_and_no_block_is_lost(
        (max_num_seqs, num_blocks, enable_prefix_caching) in (1..6usize, 4..12usize, prop::bool::weighted(0.8)),
        requests in prop::collection::vec((prop::collection::vec(0..2i64, 1..11), 1..11usize, 0..3usize, 0..10u8, 0..2usize), 1..30),
    ) {
        let config = SchedulerConfig { enable_prefix_caching, ..config(max_num_seqs, num_blocks) };
        let written = vec![(0, Vec::new()); num_blocks];
        let scheduler = Scheduler::new(config).unwrap();
        let mut driver = Driver { scheduler, sequences: BTreeMap::new(), written, found: 0 };
        for (id, (tokens, new, steps, kind, model)) in requests.into_iter().enumerate() {
            let id = id as u64;
            match kind {
                1 => driver.scheduler.add_to_read_all(id, model, &tokens),
                _ => driver.scheduler.add(id, model, &tokens),
            }
            let end = (tokens.len() + new).min(12);
            driver.sequences.insert(id, Followed { model, tokens, read: 0, end });
            (0..steps).for_each(|_| driver.step());
            if kind == 0 {
                driver.scheduler.remove(id);
                driver.sequences.remove(&id);
            }
        }
        let mut steps = 0;
        while !driver.sequences.is_empty() {
            driver.step();
            steps += 1;
            prop_assert!(steps < 30 * 12 * 12, "no end");
        }
        prop_assert!(enable_prefix_caching || driver.found == 0);
        prop_assert_eq!(driver.scheduler.free_blocks(), num_blocks);
        prop_assert_eq!((driver.scheduler.waiting(), driver.scheduler.running()), (0, 0));
    }
}

#[test]
fn a_prompt_in_common_is_read_once_and_in_the_same_step() {
    let sizes = SchedulerConfig { max_num_batched_tokens: 12, ..config(4, 20) };
    let mut scheduler = Scheduler::new(sizes).unwrap();
    let prompt = [1, 2, 3, 4, 5, 6, 7];
    (0..3).for_each(|id| scheduler.add(id, 0, &prompt));
    // The same tokens of another model are others.
    scheduler.add(3, 1, &prompt);
    let step = scheduler.schedule();
    assert_eq!(ranges(&step), [(1, 6..7), (2, 6..7), (0, 0..7), (3, 0..3)]);
    assert!(step[0].blocks[..2] == step[2].blocks[..2] && step[0].blocks[2] != step[2].blocks[2]);
    assert_eq!(scheduler.free_blocks(), 20 - 2 - 3 - 1);
    // With the flag off everything is read.
    let mut scheduler = Scheduler::new(SchedulerConfig { enable_prefix_caching: false, ..sizes }).unwrap();
    (0..2).for_each(|id| scheduler.add(id, 0, &prompt));
    assert_eq!(ranges(&scheduler.schedule()), [(0, 0..7), (1, 0..5)]);
}

#[test]
fn a_prompt_of_full_blocks_has_its_last_one_read_and_all_logits_want_all_of_it() {
    let mut scheduler = Scheduler::new(SchedulerConfig { max_num_batched_tokens: 20, ..config(4, 20) }).unwrap();
    let prompt = [1, 2, 3, 4, 5, 6];
    (0..2).for_each(|id| scheduler.add(id, 0, &prompt));
    scheduler.add_to_read_all(2, 0, &prompt);
    assert_eq!(ranges(&scheduler.schedule()), [(0, 0..6), (1, 3..6), (2, 0..6)]);
}

/// A kernel for single tokens writes and reads at once.
#[test]
fn what_a_single_token_fills_is_found_in_the_next_step() {
    let mut scheduler = Scheduler::new(config(4, 20)).unwrap();
    scheduler.add(0, 0, &[1, 2]);
    scheduler.schedule();
    scheduler.append(0, 3);
    scheduler.add(1, 0, &[1, 2, 3, 4]);
    assert_eq!(ranges(&scheduler.schedule()), [(0, 2..3), (1, 0..4)]);
    scheduler.append(0, 4);
    scheduler.add(2, 0, &[1, 2, 3, 9]);
    assert_eq!(ranges(&scheduler.schedule()), [(0, 3..4), (2, 3..4)]);
}

#[test]
fn a_preempted_sequence_finds_what_is_left_of_it() {
    let mut scheduler = Scheduler::new(config(4, 4)).unwrap();
    [(1, 5), (2, 4)].into_iter().for_each(|(id, len)| add(&mut scheduler, id, len));
    assert_eq!(ranges(&scheduler.schedule()), [(1, 0..5), (2, 0..3)]);
    [(1, 0), (1, 0)].into_iter().for_each(|(id, token)| scheduler.append(id, token));
    // The seventh token of the first takes the last block; the second has no place for its fourth.
    assert_eq!(ranges(&scheduler.schedule()), [(1, 5..7)]);
    assert_eq!(scheduler.preemptions(), 1);
    scheduler.remove(1);
    assert_eq!(ranges(&scheduler.schedule()), [(2, 3..4)], "its full block was idle");
}

/// Recurrent states are kept under first blocks.
#[test]
fn first_blocks_of_sequences_that_ended_or_were_preempted_are_told_once() {
    let mut scheduler = Scheduler::new(config(2, 4)).unwrap();
    [(1, 6), (2, 2), (3, 1)].into_iter().for_each(|(id, len)| add(&mut scheduler, id, len));
    let first = |step: &[Scheduled], id| step.iter().find(|scheduled| scheduled.id == id).unwrap().blocks[0];
    let step = scheduler.schedule();
    let [old, young] = [1, 2].map(|id| first(&step, id));
    assert!(scheduler.take_released().is_empty());
    // One that waits has none.
    scheduler.remove(3);
    // The older one grows until the younger one has no blocks.
    while scheduler.preemptions() == 0 {
        scheduler.append(1, 0);
        scheduler.schedule();
    }
    assert_eq!(scheduler.take_released(), [young]);
    scheduler.remove(1);
    assert_eq!(scheduler.take_released(), [old]);
    assert!(scheduler.take_released().is_empty());
}
