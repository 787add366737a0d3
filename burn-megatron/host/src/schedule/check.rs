//! Proves that the lists of a schedule can be run, and only once.

use std::collections::{HashMap, HashSet};

use super::{Action, Costs, Fault, Input, Link, Pass, Schedule, Transfer, Work, simulate};

impl Schedule {
    /// Checks that every micro-batch passes every stage exactly once in each direction, that nothing is listed before
    /// what it needs, that every send has its receive in the same order at both ends, and that the lists come to their
    /// end with sends that block until the receiver is there; and, with receives [ahead of time](Schedule::posted),
    /// with messages that wait for each other from one rank to another.
    ///
    /// # Errors
    /// The first [`Fault`] found.
    pub fn check(&self) -> Result<(), Fault> {
        self.check_ranks()?;
        self.check_order_between_ranks()?;
        let (costs, posted) = (Costs::uniform(self.placement().stages(), 1, 1, 1), self.posted());
        simulate(self, &costs, Link::Blocking)?;
        posted.check_order_between_ranks()?;
        simulate(&posted, &costs, Link::Posted).map(|_| ())
    }

    /// Every list by itself.
    pub(super) fn check_ranks(&self) -> Result<(), Fault> {
        (0..self.ranks.len()).try_for_each(|rank| self.check_rank(rank))
    }

    /// The first pass that a rank must do and never does.
    pub(super) fn missing_pass(&self) -> Result<(), Fault> {
        for (rank, list) in self.ranks.iter().enumerate() {
            let listed: HashSet<Action> = list.iter().copied().collect();
            let expected = self.expected(rank, &self.split_backwards(rank));
            let passes = expected.difference(&listed).filter_map(|action| match action {
                Action::Compute(work) => Some(*work),
                _ => None,
            });
            if let Some(work) = passes.min_by_key(|work| (work.micro_batch, work.chunk, work.pass)) {
                return Err(Fault::Missing { rank, action: Action::Compute(work) });
            }
        }
        Ok(())
    }

    /// One rank's list against what it must hold.
    fn check_rank(&self, rank: usize) -> Result<(), Fault> {
        let split = self.split_backwards(rank);
        let mut expected = self.expected(rank, &split);
        let mut done = HashSet::new();
        for &action in &self.ranks[rank] {
            if !expected.remove(&action) {
                return Err(Fault::Unexpected { rank, action });
            }
            let missing = match action {
                Action::Compute(work) => self.needs(rank, work, &split).into_iter().any(|need| !done.contains(&need)),
                Action::Send(sent) => !self.computed(rank, sent, &done),
                Action::Recv(_) => false,
                Action::ReduceGrads { chunk } => expected.iter().any(
                    |left| matches!(left, Action::Compute(work) if work.chunk == chunk && work.pass != Pass::Forward),
                ),
                Action::Step => !expected.is_empty(),
            };
            if missing {
                return Err(Fault::TooEarly { rank, action });
            }
            done.insert(action);
        }
        match expected.into_iter().next() {
            Some(action) => Err(Fault::Missing { rank, action }),
            None => Ok(()),
        }
    }

    /// Everything that a rank has to do in a step.
    fn expected(&self, rank: usize, split: &HashSet<(usize, usize)>) -> HashSet<Action> {
        let passes = |of| -> &[Pass] {
            match (self.spec.forward_only, split.contains(&of)) {
                (true, _) => &[Pass::Forward],
                (false, false) => &[Pass::Forward, Pass::Backward],
                (false, true) => &[Pass::Forward, Pass::BackwardInput, Pass::BackwardWeight],
            }
        };
        let mut expected = HashSet::new();
        for chunk in 0..self.placement().chunks() {
            for micro_batch in 0..self.spec.micro_batches {
                for work in passes((chunk, micro_batch)).iter().map(|&pass| Work { pass, chunk, micro_batch }) {
                    expected.insert(Action::Compute(work));
                    expected.extend(self.output(rank, work).map(Action::Send));
                    if let Some(Input::Remote(transfer)) = self.input(rank, work) {
                        expected.insert(Action::Recv(transfer));
                    }
                }
            }
            if !self.spec.forward_only {
                expected.insert(Action::ReduceGrads { chunk });
            }
        }
        if !self.spec.forward_only {
            expected.insert(Action::Step);
        }
        expected
    }

    /// What must precede a pass in the same list.
    fn needs(&self, rank: usize, work: Work, split: &HashSet<(usize, usize)>) -> Vec<Action> {
        let own = match work.pass {
            Pass::Forward => None,
            Pass::Backward | Pass::BackwardInput => Some(Pass::Forward),
            Pass::BackwardWeight => Some(Pass::BackwardInput),
        };
        let own = own.map(|pass| Action::Compute(Work { pass, ..work }));
        let input = self.input(rank, work).map(|input| match input {
            Input::Local(source) if source.pass == Pass::Forward => Action::Compute(source),
            Input::Local(source) if split.contains(&(source.chunk, source.micro_batch)) => {
                Action::Compute(Work { pass: Pass::BackwardInput, ..source })
            }
            Input::Local(source) => Action::Compute(Work { pass: Pass::Backward, ..source }),
            Input::Remote(transfer) => Action::Recv(transfer),
        });
        own.into_iter().chain(input).collect()
    }

    /// Whether a pass that is done has computed what is sent.
    fn computed(&self, rank: usize, sent: Transfer, done: &HashSet<Action>) -> bool {
        let passes = [Pass::Forward, Pass::Backward, Pass::BackwardInput];
        passes.into_iter().any(|pass| {
            let work = Work { pass, chunk: sent.chunk, micro_batch: sent.micro_batch };
            self.output(rank, work) == Some(sent) && done.contains(&Action::Compute(work))
        })
    }

    /// The chunk and micro-batch of each backward pass of a rank that is two passes, input and weight gradients.
    fn split_backwards(&self, rank: usize) -> HashSet<(usize, usize)> {
        let inputs = self.passes(rank).filter(|work| work.pass == Pass::BackwardInput);
        inputs.map(|work| (work.chunk, work.micro_batch)).collect()
    }

    fn check_order_between_ranks(&self) -> Result<(), Fault> {
        let mut sent: HashMap<(usize, usize), Vec<usize>> = HashMap::new();
        let mut received: HashMap<(usize, usize), Vec<usize>> = HashMap::new();
        for (rank, list) in self.ranks.iter().enumerate() {
            for action in list {
                match action {
                    Action::Send(t) => sent.entry((rank, t.peer)).or_default().push(t.tag),
                    Action::Recv(t) => received.entry((t.peer, rank)).or_default().push(t.tag),
                    _ => {}
                }
            }
        }
        for (&(from, to), tags) in &sent {
            let other = received.get(&(from, to)).map_or(&[][..], Vec::as_slice);
            if tags != other {
                let index = tags.iter().zip(other).take_while(|(a, b)| a == b).count();
                return Err(Fault::Unmatched { from, to, index });
            }
        }
        Ok(())
    }
}
