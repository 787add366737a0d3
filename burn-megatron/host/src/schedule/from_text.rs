//! A run's own schedule, in place of a built-in one.

use layouts::mesh::ParallelLayout;

use super::config::{PipelineConfig, PipelineError};
use super::stages::StageError;
use super::{Placement, Schedule, ScheduleSpec};

impl PipelineConfig {
    /// The lists of a schedule that [`PipelineConfig::resolve`] gave, or of another number of micro-batches.
    ///
    /// # Errors
    /// If there is no such schedule; if the configured passes are of another number of micro-batches.
    pub fn schedule(&self, spec: ScheduleSpec) -> Result<Schedule, PipelineError> {
        match &self.passes {
            Some(text) => of_micro_batches(text.parse()?, spec.micro_batches),
            None => Ok(Schedule::new(spec)?),
        }
    }

    /// What the configured passes are, if they fit a layout.
    pub(super) fn spec_of_passes(
        &self,
        text: &str,
        layout: &ParallelLayout,
        micro_batches: usize,
    ) -> Result<ScheduleSpec, PipelineError> {
        let others = [("schedule", self.schedule.is_some()), ("group-size", self.group_size.is_some())];
        if let Some((key, _)) = others.into_iter().find(|(_, set)| *set) {
            return Err(StageError::Together { key, other: "passes" }.into());
        }
        let schedule: Schedule = text.parse()?;
        let placement = schedule.placement();
        // In a V every rank has two chunks, with or without the key that says so.
        let chunks = if matches!(placement, Placement::V { .. }) { layout.vpp.max(2) } else { layout.vpp };
        let sizes =
            [("pipeline-parallel", layout.pp, placement.ranks()), ("virtual-pipeline", chunks, placement.chunks())];
        if let Some((key, value, nearest)) = sizes.into_iter().find(|(_, value, wanted)| value != wanted) {
            return Err(PipelineError::PassesOf { key, value, nearest });
        }
        if schedule.spec.forward_only {
            return Err(PipelineError::ForwardOnly);
        }
        Ok(of_micro_batches(schedule, micro_batches)?.spec)
    }
}

fn of_micro_batches(schedule: Schedule, micro_batches: usize) -> Result<Schedule, PipelineError> {
    let nearest = schedule.spec.micro_batches;
    if nearest == micro_batches {
        return Ok(schedule);
    }
    Err(PipelineError::PassesOf { key: "micro-batches of a step", value: micro_batches, nearest })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::{ScheduleKind, stages::StageLayout};

    const V: &str = "0F0 3F0 3I0 0B0 3W0\n1F0 2F0 2I0 1B0 2W0";

    fn resolve(config: &PipelineConfig, layout: &str, count: usize) -> Result<(ScheduleSpec, StageLayout), String> {
        config.resolve(&layout.parse().unwrap(), 4, count).map_err(|error| error.to_string())
    }

    fn passes(text: &str) -> PipelineConfig {
        PipelineConfig { passes: Some(text.into()), ..PipelineConfig::default() }
    }

    #[test]
    fn the_lists_are_those_of_the_text() {
        for (text, layout, count) in [
            ("0F0 0F1 0B1 0B0\n1F0 1F1 1B0 1B1", "PP2", 2),
            (V, "PP2", 1),
            (V, "PP2 VPP2", 1),
            ("0F0 0I0 0W0", "TP2", 1),
        ] {
            let config = passes(text);
            let (spec, _) = resolve(&config, layout, count).unwrap();
            assert_eq!(config.schedule(spec).unwrap(), text.parse().unwrap(), "{text}");
        }
        let built_in = ScheduleSpec::new(ScheduleKind::ZbH1, 2, 4);
        assert_eq!(PipelineConfig::default().schedule(built_in).unwrap(), Schedule::new(built_in).unwrap());
    }

    #[test]
    fn passes_of_another_run_are_refused() {
        let refuse = |config: &PipelineConfig, layout, count| resolve(config, layout, count).unwrap_err();
        let v = passes(V);
        assert_eq!(refuse(&v, "PP4", 1), "passes does not fit pipeline-parallel 4; nearest legal: 2");
        assert_eq!(refuse(&v, "PP2", 3), "passes does not fit micro-batches of a step 3; nearest legal: 1");
        let one = passes("0F0 0B0\n1F0 1B0");
        assert_eq!(refuse(&one, "PP2 VPP2", 1), "passes does not fit virtual-pipeline 2; nearest legal: 1");
        assert_eq!(refuse(&one, "PP2", 2), "passes does not fit micro-batches of a step 2; nearest legal: 1");
        assert!(refuse(&passes("0F0\n1F0"), "PP2", 1).contains("no backward passes"));
        assert!(refuse(&passes("0F0 0X0"), "TP1", 1).contains("`0X0` is no pass"));
        let both = PipelineConfig { schedule: Some(ScheduleKind::OneFOneB), ..one };
        assert!(refuse(&both, "PP2", 1).contains("schedule cannot be used together with passes"));
    }
}
