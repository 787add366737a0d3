//! Copies of the state in host memory, from which a run in one process continues after a rank has failed.

use std::collections::BTreeMap;
use std::mem::take;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use parking_lot::Mutex;

use crate::checkpoint::{Checkpoint, RunState, Slice, SliceData};

/// The newest copy that all ranks have made, and those that some have not made yet.
pub(super) struct Copies {
    every: u64,
    made: Mutex<Made>,
    /// Those that wait for a GPU.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

#[derive(Default)]
struct Made {
    ranks: usize,
    newest: Option<Arc<Checkpoint>>,
    /// By step: slices of the ranks that are through, and how many they are.
    incomplete: BTreeMap<u64, (Vec<Slice>, usize)>,
    /// Tells copies that are under way when all are dropped.
    generation: u64,
}

impl Copies {
    /// One after every so many steps.
    pub fn new(every: u64) -> Arc<Self> {
        Arc::new(Self { every, made: Mutex::default(), threads: Mutex::default() })
    }

    /// From here on so many ranks make them together.
    pub fn begin(&self, ranks: usize) {
        self.made.lock().ranks = ranks;
    }

    /// Whether one is due after this step.
    pub fn due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every)
    }

    /// Takes a rank's share of the state. What is still being copied from a GPU is waited for on another thread, so that
    /// the page-locked memory is free for the next copy.
    pub fn add(self: &Arc<Self>, state: RunState, slices: Vec<Slice>) {
        let generation = self.made.lock().generation;
        let copies = self.clone();
        let is_under_way = slices.iter().any(|slice| matches!(slice.data, SliceData::Copied(_)));
        let add = move || {
            let own = |slice: Slice| Ok(Slice { data: slice.data.into_own()?, ..slice });
            match slices.into_iter().map(own).collect::<Result<_, String>>() {
                Ok(slices) => copies.keep(generation, state, slices),
                Err(error) => log::warn!("no copy in memory of step {}: {error}", state.step),
            }
        };
        if is_under_way { self.later(add) } else { add() }
    }

    /// Adds on a thread of its own, which outlives its rank.
    fn later(&self, add: impl FnOnce() + Send + 'static) {
        let mut threads = self.threads.lock();
        threads.retain(|thread| !thread.is_finished());
        match thread::Builder::new().name("copy".into()).spawn(add) {
            Ok(thread) => threads.push(thread),
            Err(error) => log::warn!("no copy in memory: {error}"),
        }
    }

    fn keep(&self, generation: u64, state: RunState, slices: Vec<Slice>) {
        let mut made = self.made.lock();
        if made.generation != generation {
            return;
        }
        let step = state.step;
        let needed = made.ranks;
        let (all, ranks) = made.incomplete.entry(step).or_default();
        all.extend(slices);
        *ranks += 1;
        if *ranks < needed {
            return;
        }
        let slices = take(all);
        made.incomplete.retain(|other, _| *other > step);
        match Checkpoint::in_memory(state, slices) {
            Ok(copy) => made.newest = Some(Arc::new(copy)),
            Err(error) => log::warn!("no copy in memory of step {step}: {error}"),
        }
    }

    /// The newest one that is complete, when all are that have begun. Those that are not will not be: their ranks have ended.
    pub fn newest(&self) -> Option<Arc<Checkpoint>> {
        let threads = take(&mut *self.threads.lock());
        for thread in threads {
            // A panic of the thread has been printed by itself.
            let _ = thread.join();
        }
        let mut made = self.made.lock();
        made.incomplete.clear();
        made.generation += 1;
        made.newest.clone()
    }

    /// Drops them: the run has gone back to a checkpoint before them.
    pub fn clear(&self) {
        let mut made = self.made.lock();
        *made = Made { ranks: made.ranks, generation: made.generation + 1, ..Made::default() };
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use safetensors::Dtype;

    use super::*;
    use crate::checkpoint::Kind;

    fn state(step: u64) -> RunState {
        RunState { step, consumed_samples: step, updates: step, world_size: 2, ..RunState::default() }
    }

    fn copies_of_two(every: u64) -> Arc<Copies> {
        let copies = Copies::new(every);
        copies.begin(2);
        copies
    }

    /// Half of the columns of a tensor of two rows, which are the step and 10 more.
    fn half(step: u64, rank: usize) -> Vec<Slice> {
        let columns = 2 * rank..2 * rank + 2;
        let values =
            (0..2u64).flat_map(|row| columns.clone().map(move |column| (step + 10 * row + column as u64) as f32));
        vec![Slice {
            kind: Kind::Weight,
            name: "weight".into(),
            global_shape: vec![2, 4],
            ranges: vec![0..2, columns.clone()],
            dtype: Dtype::F32,
            data: values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>().into(),
        }]
    }

    #[test]
    fn the_newest_copy_is_the_last_that_all_ranks_have_made() {
        let copies = copies_of_two(5);
        assert!(copies.due(5) && !copies.due(6));
        let add = |step: u64, rank: usize| copies.add(state(step), half(step, rank));
        add(5, 1);
        add(5, 0);
        add(10, 0);
        let newest = copies.newest().unwrap();
        assert_eq!(newest.state().step, 5);
        // Any box of it can be read.
        let read = newest.read_f64(Kind::Weight, "weight", &[2, 4], &[0..2, 1..4]).unwrap();
        assert_eq!(read, [6.0, 7.0, 8.0, 16.0, 17.0, 18.0]);
        // The rank that lacked has ended; the other one makes its share anew.
        add(10, 1);
        assert_eq!(copies.newest().unwrap().state().step, 5);
        add(10, 0);
        add(10, 1);
        assert_eq!(copies.newest().unwrap().state().step, 10);
        copies.clear();
        assert!(copies.newest().is_none());
    }

    #[test]
    fn a_copy_that_is_under_way_when_its_ranks_end_is_waited_for() {
        let copies = copies_of_two(5);
        (0..2).for_each(|rank| copies.add(state(5), half(5, rank)));
        copies.add(state(10), half(10, 0));
        let last = copies.clone();
        copies.later(move || {
            thread::sleep(Duration::from_millis(100));
            last.keep(0, state(10), half(10, 1));
        });
        assert_eq!(copies.newest().unwrap().state().step, 10);
    }

    #[test]
    fn shares_that_do_not_make_up_the_state_are_no_copy() {
        let copies = copies_of_two(1);
        copies.add(state(1), half(1, 0));
        copies.add(state(1), half(1, 0));
        assert!(copies.newest().is_none());
    }
}
