//! What to plan: schedule, stages, durations.

use anyhow::{Result, bail};

use crate::schedule::stages::{Expected, Split, StageLayout};
use crate::schedule::{Costs, ScheduleKind, ScheduleSpec, Ticks};

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Schedule")]
pub(super) struct PipelineArgs {
    /// none, gpipe, 1f1b, interleaved, zb-h1 or zb-v
    #[arg(long, value_name = "NAME", default_value = "1f1b")]
    schedule: ScheduleKind,
    /// Ranks that the layers are divided over
    #[arg(long, alias = "pipeline-model-parallel-size", value_name = "N", default_value_t = 1)]
    pipeline_parallel: usize,
    /// Model chunks per rank; makes 1f1b the interleaved schedule
    #[arg(long, alias = "num-virtual-stages-per-pipeline-rank", value_name = "N")]
    virtual_pipeline: Option<usize>,
    /// Micro-batches per step
    #[arg(long, value_name = "N")]
    micro_batches: usize,
    /// Interleaved: micro-batches that a chunk takes in a row; by default the number of ranks
    #[arg(long, alias = "microbatch-group-size-per-virtual-pipeline-stage", value_name = "N")]
    microbatch_group_size: Option<usize>,
    /// Only forward passes, as in an evaluation
    #[arg(long)]
    forward_only: bool,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Stages")]
pub(super) struct StageArgs {
    /// Transformer layers; without it every stage counts the same
    #[arg(long, alias = "num-layers", value_name = "N")]
    layers: Option<usize>,
    /// Layers of the first rank
    #[arg(long, alias = "decoder-first-pipeline-num-layers", value_name = "N", requires = "layers")]
    first_stage_layers: Option<usize>,
    /// Layers of the last rank
    #[arg(long, alias = "decoder-last-pipeline-num-layers", value_name = "N", requires = "layers")]
    last_stage_layers: Option<usize>,
    /// The embedding takes the place of a layer
    #[arg(long, alias = "account-for-embedding-in-pipeline-split", requires = "layers")]
    count_embedding: bool,
    /// The loss takes the place of a layer
    #[arg(long, alias = "account-for-loss-in-pipeline-split", requires = "layers")]
    count_loss: bool,
    /// Megatron's layout string, for example `Et*3|(tt|)*29,m|L`
    #[arg(
        long, alias = "pipeline-model-parallel-layout", value_name = "TEXT", requires = "layers",
        conflicts_with_all = ["first_stage_layers", "last_stage_layers", "count_embedding", "count_loss"]
    )]
    pipeline_layout: Option<String>,
    /// Layers of multi-token prediction in the layout string
    #[arg(long, value_name = "N", default_value_t = 0, requires = "pipeline_layout")]
    mtp_num_layers: usize,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Durations")]
pub(super) struct DurationArgs {
    /// Forward, input gradient and weight gradients of a layer (of a stage without --layers), in any unit
    #[arg(long, value_name = "F,I,W", value_delimiter = ',', default_value = "1,1,1")]
    durations: Vec<Ticks>,
    /// One tensor from rank to rank, in the same unit
    #[arg(long, value_name = "T", default_value_t = 0)]
    transfer: Ticks,
}

/// Stages times micro-batches that are simulated within seconds.
const MOST_PASSES: usize = 1 << 20;

impl PipelineArgs {
    pub(super) fn spec(&self) -> Result<ScheduleSpec> {
        let mut spec = ScheduleSpec::new(self.schedule, self.pipeline_parallel, self.micro_batches);
        if let Some(chunks) = self.virtual_pipeline {
            spec = spec.with_virtual_pipeline(chunks);
        }
        spec.group_size = self.microbatch_group_size;
        spec.forward_only = self.forward_only;
        spec.check()?;
        let stages = spec.placement().stages();
        if stages.saturating_mul(spec.micro_batches) > MOST_PASSES {
            let most = (MOST_PASSES / stages).max(1);
            bail!("micro-batches {} are more than can be simulated; nearest legal: {most}", spec.micro_batches);
        }
        Ok(spec)
    }
}

impl StageArgs {
    pub(super) fn layout(&self, spec: &ScheduleSpec) -> Result<Option<StageLayout>> {
        let Some(layers) = self.layers else { return Ok(None) };
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
}

impl DurationArgs {
    pub(super) fn costs(&self, spec: &ScheduleSpec, layout: Option<&StageLayout>) -> Result<Costs> {
        let &[forward, input, weight] = self.durations.as_slice() else {
            bail!("--durations has {} numbers; three are needed: forward, input, weight", self.durations.len());
        };
        // A whole step has to fit into a number of 64 bits.
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
