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
        enforce_eager: false,
    }
}

fn ranges(step: &[Scheduled]) -> Vec<(u64, Range<usize>)> {
    step.iter().map(|scheduled| (scheduled.id, scheduled.positions.clone())).collect()
}

#[test]
fn prompts_share_the_tokens_of_a_step() {
    let mut scheduler = Scheduler::new(config(2, 20)).unwrap();
    [(1, 5), (2, 5), (3, 1)].into_iter().for_each(|(id, len)| scheduler.add(id, len));
    let step = scheduler.schedule();
    assert_eq!(ranges(&step), [(1, 0..5), (2, 0..3)]);
    assert_eq!([step[0].is_last, step[1].is_last], [true, false]);
    scheduler.append(1);
    // Single tokens come first; the third sequence waits for a place.
    assert_eq!(ranges(&scheduler.schedule()), [(1, 5..6), (2, 3..5)]);
    [1, 2].into_iter().for_each(|id| scheduler.append(id));
    scheduler.remove(1);
    assert_eq!(ranges(&scheduler.schedule()), [(2, 5..6), (3, 0..1)]);
}

#[test]
fn the_youngest_gives_its_blocks_up_and_is_read_again() {
    let mut scheduler = Scheduler::new(config(4, 4)).unwrap();
    [(1, 5), (2, 2)].into_iter().for_each(|(id, len)| scheduler.add(id, len));
    assert_eq!(ranges(&scheduler.schedule()), [(1, 0..5), (2, 0..2)]);
    [1, 2].into_iter().for_each(|id| scheduler.append(id));
    assert_eq!(ranges(&scheduler.schedule()), [(1, 5..6), (2, 2..3)]);
    [1, 2].into_iter().for_each(|id| scheduler.append(id));
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
    /// By id: tokens so far, tokens read since the sequence last started, tokens at its end.
    sequences: BTreeMap<u64, [usize; 3]>,
}

impl Driver {
    fn step(&mut self) {
        let config = *self.scheduler.config();
        let step = self.scheduler.schedule();
        let tokens: usize = step.iter().map(|scheduled| scheduled.positions.len()).sum();
        assert!(tokens <= config.max_num_batched_tokens && self.scheduler.running() <= config.max_num_seqs);
        let taken: Vec<u32> = self.scheduler.running.iter().flat_map(|sequence| sequence.blocks.clone()).collect();
        let distinct: BTreeSet<u32> = taken.iter().chain(&self.scheduler.free).copied().collect();
        assert_eq!(distinct.len(), config.num_blocks, "each block is free or one sequence's");
        assert_eq!(taken.len() + self.scheduler.free.len(), config.num_blocks);
        assert!(step.is_sorted_by_key(|scheduled| scheduled.positions.len() > 1));
        assert!(!step.is_empty() || self.sequences.is_empty(), "sequences wait and nothing is read");
        for Scheduled { id, positions, blocks, is_last } in step {
            let [len, read, end] = self.sequences[&id];
            // Each position once and in order, unless the sequence was preempted and starts anew.
            assert!(positions.start == read || positions.start == 0, "{positions:?} after {read}");
            assert!(blocks.len() * config.block_size >= positions.end);
            assert_eq!(is_last, positions.end == len);
            self.sequences.insert(id, [len, positions.end, end]);
            if is_last && len + 1 >= end {
                self.scheduler.remove(id);
                self.sequences.remove(&id);
            } else if is_last {
                self.scheduler.append(id);
                self.sequences.insert(id, [len + 1, positions.end, end]);
            }
        }
    }
}

proptest! {
    #[test]
    fn every_sequence_ends_and_no_block_is_lost(
        (max_num_seqs, num_blocks) in (1..6usize, 4..12usize),
        requests in prop::collection::vec((1..11usize, 1..11usize, 0..3usize, 0..10u8), 1..30),
    ) {
        let scheduler = Scheduler::new(config(max_num_seqs, num_blocks)).unwrap();
        let mut driver = Driver { scheduler, sequences: BTreeMap::new() };
        for (id, (prompt, new, steps, cancelled)) in requests.into_iter().enumerate() {
            driver.scheduler.add(id as u64, prompt);
            driver.sequences.insert(id as u64, [prompt, 0, (prompt + new).min(12)]);
            (0..steps).for_each(|_| driver.step());
            if cancelled == 0 {
                driver.scheduler.remove(id as u64);
                driver.sequences.remove(&(id as u64));
            }
        }
        let mut steps = 0;
        while !driver.sequences.is_empty() {
            driver.step();
            steps += 1;
            prop_assert!(steps < 30 * 12 * 12, "no end");
        }
        prop_assert_eq!(driver.scheduler.free_blocks(), num_blocks);
        prop_assert_eq!((driver.scheduler.waiting(), driver.scheduler.running()), (0, 0));
    }
}

/// Recurrent states are kept under first blocks.
#[test]
fn first_blocks_of_sequences_that_ended_or_were_preempted_are_told_once() {
    let mut scheduler = Scheduler::new(config(2, 4)).unwrap();
    [(1, 6), (2, 2), (3, 1)].into_iter().for_each(|(id, len)| scheduler.add(id, len));
    let first = |step: &[Scheduled], id| step.iter().find(|scheduled| scheduled.id == id).unwrap().blocks[0];
    let step = scheduler.schedule();
    let [old, young] = [1, 2].map(|id| first(&step, id));
    assert!(scheduler.take_released().is_empty());
    // One that waits has none.
    scheduler.remove(3);
    // The older one grows until the younger one has no blocks.
    while scheduler.preemptions() == 0 {
        scheduler.append(1);
        scheduler.schedule();
    }
    assert_eq!(scheduler.take_released(), [young]);
    scheduler.remove(1);
    assert_eq!(scheduler.take_released(), [old]);
    assert!(scheduler.take_released().is_empty());
}
