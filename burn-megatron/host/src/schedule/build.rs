//! From the order of the passes to complete lists: transfers, gradient reductions, step.

use super::{Action, Costs, Fault, Input, Link, Schedule, ScheduleError, ScheduleSpec, Span, Work, orders, simulate};

impl Schedule {
    /// The lists of a wanted schedule.
    ///
    /// Transfers are listed where they happen if a forward takes as long as each half of a backward and a transfer
    /// takes no time: at the moment the tensor is ready, between the passes of both ranks. As all lists then follow one
    /// order in time, they cannot deadlock, whatever the passes really take and even if sends block.
    ///
    /// # Errors
    /// If there is no such schedule; see [`ScheduleSpec::check`].
    pub fn new(spec: ScheduleSpec) -> Result<Schedule, ScheduleError> {
        spec.check()?;
        Ok(Self::known(spec, &orders::passes(&spec)))
    }

    /// All forward passes, then all backward passes, with the stages placed as in `spec`: for fewer micro-batches than its
    /// schedule can take.
    pub fn all_forward_all_backward(spec: ScheduleSpec) -> Schedule {
        Self::known(spec, &orders::all_forward_all_backward(&spec))
    }

    fn known(spec: ScheduleSpec, passes: &[Vec<Work>]) -> Schedule {
        let by_need = Schedule::transfers_by_need(spec, passes);
        by_need.transfers_by_time().expect("receives by need follow the layers").finished()
    }

    /// The lists of passes in any order, if they can be run.
    pub(super) fn of_passes(spec: ScheduleSpec, passes: &[Vec<Work>]) -> Result<Schedule, Fault> {
        let by_need = Schedule::transfers_by_need(spec, passes);
        // What is missing or comes too early in a list says more than the deadlock that it causes.
        by_need.missing_pass()?;
        by_need.clone().finished().check_ranks()?;
        let schedule = by_need.transfers_by_time()?.finished();
        schedule.check()?;
        Ok(schedule)
    }

    /// Receives right before the pass that needs the tensor, sends right after the pass that computed it.
    fn transfers_by_need(spec: ScheduleSpec, passes: &[Vec<Work>]) -> Schedule {
        let shape = Schedule { spec, ranks: Vec::new() };
        let list = |(rank, passes): (usize, &Vec<Work>)| {
            let mut list = Vec::with_capacity(3 * passes.len());
            for &work in passes {
                list.extend(shape.input(rank, work).and_then(Input::transfer).map(Action::Recv));
                list.push(Action::Compute(work));
                list.extend(shape.output(rank, work).map(Action::Send));
            }
            list
        };
        Schedule { spec, ranks: passes.iter().enumerate().map(list).collect() }
    }

    /// With gradient reductions and the step.
    fn finished(mut self) -> Schedule {
        if !self.spec.forward_only {
            self.ranks.iter_mut().for_each(finish);
        }
        self
    }

    /// Every transfer at the time at which it is ready, in all lists.
    fn transfers_by_time(self) -> Result<Schedule, Fault> {
        let placement = self.placement();
        let timeline = simulate(&self, &Costs::uniform(placement.stages(), 1, 1, 1), Link::Overlapped)?;
        let mut ready = vec![0; self.tags()];
        for span in timeline.ranks.iter().flatten() {
            if let Action::Send(transfer) = span.action {
                ready[transfer.tag] = span.start;
            }
        }
        let by_time = |spans: &Vec<Span>| {
            let mut keyed: Vec<_> = spans
                .iter()
                .enumerate()
                .map(|(index, span)| match span.action {
                    Action::Send(t) | Action::Recv(t) => ((ready[t.tag], 0, t.tag), span.action),
                    _ => ((span.start, 1, index), span.action),
                })
                .collect();
            keyed.sort_unstable_by_key(|&(key, _)| key);
            keyed.into_iter().map(|(_, action)| action).collect()
        };
        Ok(Schedule { spec: self.spec, ranks: timeline.ranks.iter().map(by_time).collect() })
    }
}

/// Reduction of each chunk's gradients right after its last pass, and the step.
fn finish(list: &mut Vec<Action>) {
    let mut seen = Vec::new();
    for index in (0..list.len()).rev() {
        if let Action::Compute(Work { pass, chunk, .. }) = list[index]
            && pass.frees_activations()
            && !seen.contains(&chunk)
        {
            seen.push(chunk);
            list.insert(index + 1, Action::ReduceGrads { chunk });
        }
    }
    list.push(Action::Step);
}
