//! The flags of a schedule: its kind, its stages and the durations of passes.

use std::path::PathBuf;

use anyhow::{Result, anyhow, bail};

use super::super::layout::LayoutArgs;
use super::super::refused;
use crate::data::read_text;
use crate::refusal::Access;
use crate::schedule::stages::{Expected, Split, StageLayout};
use crate::schedule::{Costs, Schedule, ScheduleKind, ScheduleSpec, Ticks};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Schedule")]
pub(super) struct PipelineArgs {
    /// Pipeline schedule: none, gpipe, 1f1b, interleaved, zb-h1 or zb-v [default: 1f1b, or interleaved with several chunks]
    #[arg(long, value_name = "NAME")]
    schedule: Option<ScheduleKind>,
    /// Text file of a schedule: a line per rank, a word per pass, for example `0F0 0F1 0B0 0B1` (stage, pass, micro-batch)
    #[arg(
        long, value_name = "FILE",
        conflicts_with_all = [
            "config", "schedule", "micro_batches", "microbatch_group_size", "forward_only", "pipeline_parallel", "virtual_pipeline"
        ]
    )]
    pub(super) schedule_file: Option<PathBuf>,
    /// Micro-batches per step
    #[arg(long, value_name = "N", conflicts_with = "config")]
    pub(super) micro_batches: Option<usize>,
    /// Interleaved schedule: consecutive micro-batches per model chunk [default: the number of ranks]
    #[arg(long, alias = "microbatch-group-size-per-virtual-pipeline-stage", value_name = "N")]
    microbatch_group_size: Option<usize>,
    /// Forward passes only, as in evaluation
    #[arg(long, conflicts_with = "config")]
    forward_only: bool,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Stages")]
pub(super) struct StageArgs {
    /// Number of transformer layers; without it all stages cost the same
    #[arg(long, alias = "num-layers", value_name = "N", conflicts_with = "config")]
    layers: Option<usize>,
    /// Number of layers on the first rank
    #[arg(long, alias = "decoder-first-pipeline-num-layers", value_name = "N")]
    first_stage_layers: Option<usize>,
    /// Number of layers on the last rank
    #[arg(long, alias = "decoder-last-pipeline-num-layers", value_name = "N")]
    last_stage_layers: Option<usize>,
    /// Count the embedding as a layer
    #[arg(long, alias = "account-for-embedding-in-pipeline-split")]
    count_embedding: bool,
    /// Count the output layer with the loss as a layer
    #[arg(long, alias = "account-for-loss-in-pipeline-split")]
    count_loss: bool,
    /// Megatron's layout string, for example `Et*3|(tt|)*29,m|L`
    #[arg(
        long, alias = "pipeline-model-parallel-layout", value_name = "TEXT",
        conflicts_with_all = ["first_stage_layers", "last_stage_layers", "count_embedding", "count_loss"]
    )]
    pipeline_layout: Option<String>,
    /// Number of multi-token prediction layers in the layout string
    #[arg(long, value_name = "N", default_value_t = 0, requires = "pipeline_layout", conflicts_with = "config")]
    mtp_num_layers: usize,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Durations")]
pub(super) struct DurationArgs {
    /// Durations of a layer's forward, input-gradient and weight-gradient pass (of a stage's without --layers), in any unit
    #[arg(long, value_name = "F,I,W", value_delimiter = ',', default_value = "1,1,1", conflicts_with = "config")]
    durations: Vec<Ticks>,
    /// Duration of a transfer from rank to rank, in the same unit
    #[arg(long, value_name = "T", default_value_t = 0, conflicts_with = "config")]
    transfer: Ticks,
}

/// Stages times micro-batches that can be simulated within seconds.
const MOST_PASSES: usize = 1 << 20;

/// Layers of a model.
const MOST_LAYERS: usize = 1 << 12;

/// Refuses what is beyond all bounds before it is multiplied.
fn limited(flag: &str, value: Option<usize>, most: usize) -> Result<()> {
    match value.filter(|value| *value > most) {
        Some(value) => bail!("--{flag} {value} is more than can be planned; nearest legal: {most}"),
        None => Ok(()),
    }
}

impl PipelineArgs {
    /// The schedule that is asked for, by name or as text.
    pub(super) fn wanted(&self, layout: &LayoutArgs) -> Result<Schedule> {
        let Some(file) = &self.schedule_file else { return Ok(Schedule::new(self.spec(layout)?)?) };
        let text = read_text(file).map_err(refused(Access::Read, file))?;
        text.parse().map_err(|error| anyhow!("{}: {error}", file.display()))
    }

    fn spec(&self, layout: &LayoutArgs) -> Result<ScheduleSpec> {
        let kind = self.schedule.unwrap_or(ScheduleKind::OneFOneB);
        let micro_batches = self.micro_batches.unwrap_or(1);
        limited("pipeline-parallel", layout.pipeline_parallel, MOST_PASSES)?;
        limited("virtual-pipeline", layout.virtual_pipeline, MOST_LAYERS)?;
        limited("microbatch-group-size", self.microbatch_group_size, MOST_PASSES)?;
        limited("micro-batches", self.micro_batches, MOST_PASSES)?;
        let mut spec = ScheduleSpec::new(kind, layout.pipeline_parallel.unwrap_or(1), micro_batches);
        if let Some(chunks) = layout.virtual_pipeline {
            spec = spec.with_virtual_pipeline(chunks);
        }
        spec.group_size = self.microbatch_group_size;
        spec.forward_only = self.forward_only;
        spec.check()?;
        let stages = spec.placement().stages();
        if stages.saturating_mul(spec.micro_batches) > MOST_PASSES {
            let most = (MOST_PASSES / stages).max(1);
            bail!("--micro-batches {} are more than can be simulated; nearest legal: {most}", spec.micro_batches);
        }
        Ok(spec)
    }
}

impl StageArgs {
    pub(super) fn layout(&self, spec: &ScheduleSpec) -> Result<Option<StageLayout>> {
        let Some(layers) = self.layers else {
            let given = self.keys().into_iter().find(|(_, value)| value.is_some());
            return given.map_or(Ok(None), |(key, _)| Err(anyhow!("--{key} says how --layers are split; give it too")));
        };
        limited("layers", Some(layers), MOST_LAYERS)?;
        limited("mtp-num-layers", Some(self.mtp_num_layers), MOST_LAYERS)?;
        if let Some(text) = &self.pipeline_layout {
            let expected = Expected {
                layers,
                mtp_layers: self.mtp_num_layers,
                pipeline_parallel: spec.pipeline_parallel,
                virtual_pipeline: Some(spec.virtual_pipeline),
            };
            return Ok(Some(StageLayout::parse(text, &expected)?));
        }
        let split = Split {
            layers,
            placement: spec.placement(),
            first: self.first_stage_layers,
            last: self.last_stage_layers,
            count_embedding: self.count_embedding,
            count_loss: self.count_loss,
        };
        Ok(Some(split.layout()?))
    }

    /// The flags as keys of a configuration's `pipeline` section.
    fn keys(&self) -> [(&'static str, Option<String>); 5] {
        let number = |value: Option<usize>| value.map(|value| value.to_string());
        let flag = |given: bool| given.then(|| "true".to_string());
        [
            ("first-stage-layers", number(self.first_stage_layers)),
            ("last-stage-layers", number(self.last_stage_layers)),
            ("count-embedding", flag(self.count_embedding)),
            ("count-loss", flag(self.count_loss)),
            ("pipeline-layout", self.pipeline_layout.clone()),
        ]
    }

    /// The flags of stages and schedule as overrides of a configuration.
    pub(super) fn overrides(&self, pipeline: &PipelineArgs) -> Vec<(String, String)> {
        let schedule = pipeline.schedule.map(|kind| kind.name().to_string());
        let group = pipeline.microbatch_group_size.map(|size| size.to_string());
        let more = [("schedule", schedule), ("microbatch-group-size", group)];
        let all = self.keys().into_iter().chain(more);
        all.filter_map(|(key, value)| Some((format!("pipeline.{key}"), value?))).collect()
    }
}

impl DurationArgs {
    pub(super) fn costs(&self, spec: &ScheduleSpec, layout: Option<&StageLayout>) -> Result<Costs> {
        let &[forward, input, weight] = self.durations.as_slice() else {
            bail!("--durations has {} numbers; three are needed: forward, input, weight", self.durations.len());
        };
        // The duration of a whole step must fit into 64 bits.
        const MOST: Ticks = 1 << 30;
        if let Some(most) = [forward, input, weight, self.transfer].into_iter().find(|&ticks| ticks > MOST) {
            bail!("a duration of {most} is too long; nearest legal: {MOST}");
        }
        if forward == 0 || input + weight == 0 {
            bail!("--durations {forward},{input},{weight}: forward and backward take time; nearest legal: 1");
        }
        let layers = layout.map_or(vec![1; spec.placement().stages()], StageLayout::layer_counts);
        Ok(Costs::per_layer(&layers, forward, input, weight).with_transfer(self.transfer))
    }
}
