//! Numbers that are in use or free, smallest first: what a pool of reusable events hands out.

use std::collections::BTreeSet;

/// Which slots of a pool are in use.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    free: BTreeSet<usize>,
    made: usize,
}

impl Slots {
    /// A slot that nobody uses.
    pub(crate) fn take(&mut self) -> usize {
        self.free.pop_first().unwrap_or_else(|| {
            self.made += 1;
            self.made - 1
        })
    }

    /// Gives `slot` back.
    ///
    /// # Panics
    /// If nobody had taken it.
    pub(crate) fn give(&mut self, slot: usize) {
        assert!(slot < self.made && self.free.insert(slot), "slot {slot} of {} was not in use", self.made);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_in_flight_has_its_own_slot() {
        let mut slots = Slots::default();
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
        let mut slots = Slots::default();
        let slot = slots.take();
        slots.give(slot);
        slots.give(slot);
    }
}
