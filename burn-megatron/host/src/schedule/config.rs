//! What a run's configuration says of its pipeline.

use layouts::mesh::ParallelLayout;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::stages::{Expected, PartCosts, Split, StageError, StageLayout};
use super::{Schedule, ScheduleError, ScheduleKind, ScheduleSpec, ScheduleTextError};

/// The layout string of layers that are divided by what they cost, until [`PipelineConfig::settle`].
pub const AUTO: &str = "auto";

/// Order of the passes and division of the layers; the sizes are in the [`ParallelLayout`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct PipelineConfig {
    /// Which schedule; by itself none on one rank, 1F1B on several, interleaved with several chunks per rank.
    pub schedule: Option<ScheduleKind>,
    /// See [`ScheduleSpec::group_size`].
    pub group_size: Option<usize>,
    /// The passes of every rank as text, as a [`Schedule`] is read; excludes the two above.
    pub passes: Option<String>,
    /// Megatron's layout string, or [`AUTO`]; excludes the four below.
    pub layout: Option<String>,
    /// See [`Split::first`].
    pub first_layers: Option<usize>,
    /// See [`Split::last`].
    pub last_layers: Option<usize>,
    /// See [`Split::count_embedding`].
    pub count_embedding: bool,
    /// See [`Split::count_loss`].
    pub count_loss: bool,
}

/// Why a model cannot run in a pipeline as configured.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PipelineError {
    /// There is no such schedule.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The configured passes are no schedule.
    #[error("passes: {0}")]
    Passes(#[from] ScheduleTextError),
    /// The configured passes are of other sizes.
    #[error("passes does not fit {key} {value}; nearest legal: {nearest}")]
    #[allow(missing_docs, reason = "the fields are the values in the message")]
    PassesOf { key: &'static str, value: usize, nearest: usize },
    /// The configured passes do not train.
    #[error("passes has no backward passes; every stage needs one of each micro-batch, for example 0B0")]
    ForwardOnly,
    /// The layers cannot be divided so.
    #[error(transparent)]
    Stages(#[from] StageError),
}

impl PipelineConfig {
    /// Schedule and stages of a model of `layers` layers.
    ///
    /// # Errors
    /// Names the key, its value and the nearest legal one.
    pub fn resolve(
        &self,
        layout: &ParallelLayout,
        layers: usize,
        micro_batches: usize,
    ) -> Result<(ScheduleSpec, StageLayout), PipelineError> {
        let spec = match &self.passes {
            Some(text) => self.spec_of_passes(text, layout, micro_batches)?,
            None => {
                let spec = self.built_in(layout, micro_batches);
                spec.check()?;
                spec
            }
        };
        Ok((spec, self.stages(&spec, layers)?))
    }

    fn built_in(&self, layout: &ParallelLayout, micro_batches: usize) -> ScheduleSpec {
        let by_size = if layout.pp > 1 { ScheduleKind::OneFOneB } else { ScheduleKind::NoPipeline };
        let kind = self.schedule.unwrap_or(by_size);
        let mut spec = ScheduleSpec::new(kind, layout.pp, micro_batches);
        if layout.vpp > 1 {
            spec = spec.with_virtual_pipeline(layout.vpp);
        }
        spec.group_size = self.group_size;
        spec
    }

    /// Writes the layout that [`AUTO`] means for a model with these costs. Where there is none, equal stages are
    /// asked for, and refused by name.
    pub fn settle(&mut self, layout: &ParallelLayout, costs: &PartCosts) {
        let with_others = self.first_layers.or(self.last_layers).is_some() || self.count_embedding || self.count_loss;
        if self.layout.as_deref() == Some(AUTO) && !with_others {
            let of_text = self.passes.as_deref().and_then(|text| text.parse::<Schedule>().ok());
            let spec = of_text.map_or_else(|| self.built_in(layout, 1), |schedule| schedule.spec);
            let division = StageLayout::by_cost(costs, spec.placement());
            self.layout = division.filter(|_| layout.pp > 1).map(|division| division.to_string());
        }
    }

    fn stages(&self, spec: &ScheduleSpec, layers: usize) -> Result<StageLayout, StageError> {
        let Some(text) = &self.layout else {
            let (count_embedding, count_loss) = (self.count_embedding, self.count_loss);
            let (first, last) = (self.first_layers, self.last_layers);
            let split = Split { first, last, count_embedding, count_loss, ..Split::equal(layers, spec.placement()) };
            return split.layout();
        };
        let others = [
            ("first-stage-layers", self.first_layers.is_some()),
            ("last-stage-layers", self.last_layers.is_some()),
            ("count-embedding", self.count_embedding),
            ("count-loss", self.count_loss),
        ];
        if let Some((key, _)) = others.into_iter().find(|(_, set)| *set) {
            return Err(StageError::Together { key, other: "pipeline-layout" });
        }
        let virtual_pipeline = Some(spec.placement().chunks());
        StageLayout::parse(
            text,
            &Expected { layers, mtp_layers: 0, pipeline_parallel: spec.pipeline_parallel, virtual_pipeline },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(config: &PipelineConfig, layout: &str, layers: usize) -> Result<(ScheduleKind, Vec<usize>), String> {
        let (spec, stages) = config.resolve(&layout.parse().unwrap(), layers, 4).map_err(|e| e.to_string())?;
        Ok((spec.kind, stages.layer_counts()))
    }

    #[test]
    fn sizes_choose_the_schedule() {
        let config = PipelineConfig::default();
        assert_eq!(resolve(&config, "TP2", 4), Ok((ScheduleKind::NoPipeline, vec![4])));
        assert_eq!(resolve(&config, "PP2", 4), Ok((ScheduleKind::OneFOneB, vec![2, 2])));
        assert_eq!(resolve(&config, "PP2 VPP2", 4), Ok((ScheduleKind::Interleaved, vec![1; 4])));
        let v = PipelineConfig { schedule: Some(ScheduleKind::ZbV), ..config };
        assert_eq!(resolve(&v, "PP2", 4), Ok((ScheduleKind::ZbV, vec![1; 4])));
    }

    #[test]
    fn automatic_layouts_are_settled_by_cost() {
        let settle = |mut config: PipelineConfig, layout: &str, end: f64| {
            let layout: ParallelLayout = layout.parse().unwrap();
            config.settle(&layout, &PartCosts { layers: vec![1.0; 8], end });
            config
        };
        let auto = PipelineConfig { layout: Some(AUTO.into()), ..Default::default() };
        let settled = settle(auto.clone(), "PP2", 2.0);
        assert_eq!(settled.layout.as_deref(), Some("Et*5|tttL"));
        assert_eq!(resolve(&settled, "PP2", 8), Ok((ScheduleKind::OneFOneB, vec![5, 3])));
        let v = PipelineConfig { schedule: Some(ScheduleKind::ZbV), ..auto.clone() };
        assert_eq!(resolve(&settle(v, "PP2", 2.0), "PP2", 8).unwrap().1.last(), Some(&1));
        assert_eq!(settle(auto.clone(), "TP2", 2.0).layout, None);
        let refused = resolve(&settle(auto.clone(), "PP16", 2.0), "PP16", 8).unwrap_err();
        assert!(refused.contains("nearest legal: layers 16"), "{refused}");
        let both = settle(PipelineConfig { count_loss: true, ..auto }, "PP2", 2.0);
        assert!(resolve(&both, "PP2", 8).unwrap_err().contains("cannot be used together"));
    }

    #[test]
    fn layers_are_divided_as_asked_or_refused() {
        let uneven = PipelineConfig { layout: Some("Et|ttL".into()), ..Default::default() };
        assert_eq!(resolve(&uneven, "PP2", 3), Ok((ScheduleKind::OneFOneB, vec![1, 2])));
        let both = PipelineConfig { count_loss: true, ..uneven };
        assert!(resolve(&both, "PP2", 3).unwrap_err().contains("pipeline-layout"));
        let refused = resolve(&PipelineConfig::default(), "PP2", 3).unwrap_err();
        assert!(refused.contains("nearest legal: layers 2, 4, or pipeline-layout"), "{refused}");
    }
}
