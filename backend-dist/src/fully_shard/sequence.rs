//! The order in which a pass uses parameters, learned from the pass before.

/// The uses of parameters in a pass, in order.
#[derive(Debug, Default)]
pub(super) struct Sequence {
    uses: Vec<usize>,
    /// Whether `uses` is what a whole pass has done.
    is_known: bool,
    /// Uses of this pass so far.
    at: usize,
    /// Uses of this pass that were started.
    started: usize,
}

impl Sequence {
    /// A new pass begins. What the last one has used is the order of this one.
    pub fn begin(&mut self) {
        // A pass that stopped early has shown less than is known.
        self.is_known = !self.uses.is_empty();
        (self.at, self.started) = (0, 0);
    }

    /// What was started and not used is thrown away.
    pub fn interrupt(&mut self) {
        self.started = self.at;
    }

    /// The pass uses `index`. Returns whether that was expected; if not, nothing is known of what follows.
    pub fn follow(&mut self, index: usize) -> bool {
        if self.is_known && self.uses.get(self.at) == Some(&index) {
            self.at += 1;
            self.started = self.started.max(self.at);
            return true;
        }
        self.uses.truncate(self.at);
        self.uses.push(index);
        self.at += 1;
        self.started = self.at;
        self.is_known = false;
        false
    }

    /// The uses to start now: those of the unit that is in use and of the one after it, which were not started.
    pub fn ahead(&mut self, unit: impl Fn(usize) -> usize) -> Vec<usize> {
        if !self.is_known || self.at == 0 {
            return Vec::new();
        }
        let current = unit(self.uses[self.at - 1]);
        let mut next = None;
        let rest = &self.uses[self.at..];
        let window = rest.iter().take_while(|&&index| {
            let unit = unit(index);
            unit == current && next.is_none() || *next.get_or_insert(unit) == unit
        });
        let end = self.at + window.count();
        let from = self.started.min(end);
        self.started = self.started.max(end);
        self.uses[from..end].to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units of two parameters each.
    fn unit(index: usize) -> usize {
        index / 2
    }

    fn pass(sequence: &mut Sequence, uses: &[usize]) -> Vec<(bool, Vec<usize>)> {
        sequence.begin();
        uses.iter().map(|&index| (sequence.follow(index), sequence.ahead(unit))).collect()
    }

    #[test]
    fn the_rest_of_a_unit_and_the_next_come_ahead() {
        let mut sequence = Sequence::default();
        let nothing = vec![(false, vec![]); 6];
        assert_eq!(pass(&mut sequence, &[0, 1, 2, 3, 4, 5]), nothing);
        let expected = [(true, vec![1, 2, 3]), (true, vec![]), (true, vec![4, 5])];
        assert_eq!(pass(&mut sequence, &[0, 1, 2]), expected);
        // It was short, but what is known stays known.
        let all = pass(&mut sequence, &[0, 1, 2, 3, 4, 5]);
        assert!(all.iter().all(|(expected, _)| *expected));
        assert_eq!(all.iter().map(|(_, ahead)| ahead.len()).sum::<usize>(), 5);
    }

    #[test]
    fn a_parameter_used_twice_comes_twice() {
        let mut sequence = Sequence::default();
        pass(&mut sequence, &[0, 2, 0]);
        assert_eq!(pass(&mut sequence, &[0, 2, 0]), [(true, vec![2]), (true, vec![0]), (true, vec![])]);
    }

    #[test]
    fn what_was_thrown_away_is_started_again() {
        let mut sequence = Sequence::default();
        pass(&mut sequence, &[0, 1, 2, 3]);
        assert_eq!(pass(&mut sequence, &[0]), [(true, vec![1, 2, 3])]);
        sequence.interrupt();
        assert!(sequence.follow(1));
        assert_eq!(sequence.ahead(unit), [2, 3]);
    }

    #[test]
    fn another_order_is_learned_anew() {
        let mut sequence = Sequence::default();
        pass(&mut sequence, &[0, 2, 4]);
        let changed = pass(&mut sequence, &[0, 4, 2]);
        assert_eq!(changed, [(true, vec![2]), (false, vec![]), (false, vec![])]);
        assert!(pass(&mut sequence, &[0, 4, 2]).iter().all(|(expected, _)| *expected));
    }
}
