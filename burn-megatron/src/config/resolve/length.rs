//! The length of a run, in the unit in which it is given.

use super::Values;
use crate::batch::{BatchPlan, BatchSizes};
use crate::config::problem::{Origin, Problem};

impl Values {
    /// Turns `training.samples` or `training.tokens` into `training.steps`. If several are given, the command line
    /// overrides the file; within one of them they must agree.
    pub(super) fn settle_length(&mut self) {
        let sizes = self.batch_sizes();
        let seq_length = self.number("training.seq-length").max(1);
        let lengths = [("training.samples", "samples", 1), ("training.tokens", "tokens", seq_length)];
        let lengths =
            lengths.map(|(path, unit, size)| (path, unit, size, self.values.remove(path).and_then(|n| n.as_u64())));
        let on_command_line = |origin: &Origin| *origin == Origin::CommandLine;
        let mut earlier = self.given.get("training.steps").map(|origin| ("training.steps", origin.clone()));
        for (path, unit, size, length) in lengths {
            let Some(length) = length else { continue };
            let origin = self.given[path].clone();
            let over = earlier.as_ref().map(|(_, other)| (on_command_line(other), on_command_line(&origin)));
            if over == Some((true, false)) {
                continue;
            }
            let (whole, before) = (sizes.steps(length / size), self.number("training.steps"));
            let exact = |steps: u64| sizes.samples(steps).saturating_mul(size);
            let mut refuse = |what: String| self.problems.push(Problem { origin: origin.clone(), what });
            if exact(whole) != length {
                let nearest = [exact(whole), exact(whole + 1)].map(|length| length.to_string());
                let nearest = nearest[usize::from(whole == 0)..].join(" or ");
                refuse(format!("{path} = {length} are not the {unit} of whole steps; nearest legal: {nearest}"));
            } else if let (Some((other, _)), Some(true)) = (&earlier, over.map(|(a, b)| a == b && whole != before)) {
                refuse(format!(
                    "{path} = {length} makes {whole} steps, but {other} makes {before}: give only one of the two"
                ));
            } else {
                self.values.insert("training.steps", whole.into());
                earlier = Some((path, origin));
            }
        }
    }

    /// Sequences of every global batch; without the ramp where it is refused later.
    pub(super) fn batch_sizes(&self) -> BatchSizes {
        let global = (self.number("training.global-batch") as usize).max(1);
        let ramp = self.values.get("training.rampup-batch-size").cloned().unwrap_or_default();
        let sizes = BatchSizes { global, ramp: serde_json::from_value(ramp).ok().flatten() };
        if BatchPlan::at(&sizes, 0, 1, 1).is_ok() { sizes } else { global.into() }
    }
}
