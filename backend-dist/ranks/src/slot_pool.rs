//! A pool of indices, for reusable events. The smallest free index is taken first.

use std::collections::BTreeSet;

/// The free and used slots of a pool.
#[derive(Debug, Default)]
pub(crate) struct SlotPool {
    free: BTreeSet<usize>,
    made: usize,
}

impl SlotPool {
    /// Takes a free slot.
    pub(crate) fn take(&mut self) -> usize {
        self.free.pop_first().unwrap_or_else(|| {
            self.made += 1;
            self.made - 1
        })
    }

    /// Returns `slot`.
    ///
    /// # Panics
    /// If it was not taken.
    pub(crate) fn give(&mut self, slot: usize) {
        assert!(slot < self.made && self.free.insert(slot), "slot {slot} of {} was not in use", self.made);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_in_flight_has_its_own_slot() {
        let mut slots = SlotPool::default();
        assert_eq!([slots.take(), slots.take(), slots.take()], [0, 1, 2]);
        slots.give(1);
        assert_eq!([slots.take(), slots.take()], [1, 3]);
        for slot in 0..4 {
            slots.give(slot);
        }
        assert_eq!((slots.take(), slots.made), (0, 4));
    }

    #[test]
    #[should_panic(expected = "slot 0 of 1 was not in use")]
    fn a_slot_is_given_back_once() {
        let mut slots = SlotPool::default();
        let slot = slots.take();
        slots.give(slot);
        slots.give(slot);
    }
}
