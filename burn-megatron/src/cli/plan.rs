//! `burn-megatron plan`: what a pipeline schedule costs, before anything starts.

use std::fmt::Write;
use std::fs;
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use super::print;
use crate::schedule::draw::{self, Colors};
use crate::schedule::stages::{Expected, Split, Stage, StageLayout};
use crate::schedule::{Costs, Link, Schedule, ScheduleKind, ScheduleSpec, Ticks, Timeline, bounds, simulate};

/// Arguments of `plan`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Draw the time line of every rank
    #[arg(long)]
    draw: bool,
    /// Also draw it into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    pipeline: PipelineArgs,
    #[command(flatten)]
    stages: StageArgs,
    #[command(flatten)]
    durations: DurationArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Schedule")]
struct PipelineArgs {
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
struct StageArgs {
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
struct DurationArgs {
    /// Forward, input gradient and weight gradients of a layer (of a stage without --layers), in any unit
    #[arg(long, value_name = "F,I,W", value_delimiter = ',', default_value = "1,1,1")]
    durations: Vec<Ticks>,
    /// One tensor from rank to rank, in the same unit
    #[arg(long, value_name = "T", default_value_t = 0)]
    transfer: Ticks,
}

/// Columns of a drawing where the terminal's are not known.
const WIDTH: usize = 120;

/// Prints bubble and activations in flight, and draws.
pub fn run(args: Args) -> Result<ExitCode> {
    let plan = Plan::of(&args)?;
    let colors = if io::stdout().is_terminal() { Colors::Ansi } else { Colors::Off };
    print(&plan.report(args.draw.then_some(colors))?)?;
    if let Some(file) = &args.svg {
        let svg = draw::svg(&plan.timeline, &plan.title(), &plan.bubble());
        fs::write(file, svg).with_context(|| file.display().to_string())?;
        print(&format!("wrote {}\n", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A schedule, how long its passes take, and when it does what.
struct Plan {
    schedule: Schedule,
    layout: Option<StageLayout>,
    costs: Costs,
    timeline: Timeline,
}

impl Plan {
    fn of(args: &Args) -> Result<Self> {
        let spec = args.pipeline.spec()?;
        let layout = args.stages.layout(&spec)?;
        let costs = args.durations.costs(&spec, layout.as_ref())?;
        let schedule = Schedule::new(spec)?;
        schedule.check().context("a schedule that cannot run was made; this is a bug")?;
        let timeline = simulate(&schedule, &costs, Link::Overlapped)?;
        Ok(Self { schedule, layout, costs, timeline })
    }

    fn report(&self, draw: Option<Colors>) -> Result<String> {
        let mut report = format!("{}\n", self.title());
        if let Some(layout) = &self.layout {
            report += &self.stages(layout);
        }
        if let Some(colors) = draw {
            report += &draw::text(&self.timeline, WIDTH, colors);
        }
        let formula = if self.is_as_the_formula() { ", as the formula says" } else { "" };
        _ = writeln!(report, "{}{formula}", self.bubble());
        for (link, how) in
            [(Link::InOrder, "one after the other on each rank"), (Link::Blocking, "stopping both ranks")]
        {
            let other = simulate(&self.schedule, &self.costs, link)?.makespan();
            if other > self.timeline.makespan() {
                let longer = 100.0 * (other as f64 / self.timeline.makespan() as f64 - 1.0);
                _ = writeln!(report, "  with transfers {how}: {longer:.1} % longer");
            }
        }
        Ok(report + &self.activations())
    }

    fn title(&self) -> String {
        let spec = &self.schedule.spec;
        let ranks = match (spec.pipeline_parallel, spec.virtual_pipeline) {
            (1, _) => "1 rank".to_string(),
            (ranks, 1) => format!("{ranks} ranks"),
            (ranks, chunks) => format!("{ranks} ranks of {chunks} chunks"),
        };
        let group = spec.group_size.map_or(String::new(), |size| format!(" in groups of {size}"));
        let only = if spec.forward_only { ", forward only" } else { "" };
        format!("{}, {ranks}, micro-batches: {}{group}{only}", spec.kind, spec.micro_batches)
    }

    fn stages(&self, layout: &StageLayout) -> String {
        let placement = self.schedule.placement();
        let mut text = format!("pipeline-layout {layout}\n");
        for rank in 0..placement.ranks() {
            let chunks = (0..placement.chunks()).map(|chunk| describe(&layout.stages()[placement.stage(rank, chunk)]));
            _ = writeln!(text, "  rank {rank}: {}", chunks.collect::<Vec<_>>().join("; "));
        }
        text
    }

    fn bubble(&self) -> String {
        let (step, computing) = (100.0 * self.timeline.idle_share(), 100.0 * self.timeline.bubble_ratio());
        let time = self.timeline.makespan();
        format!("bubble: {step:.1} % of the step ({computing:.1} % of the computing time); a step takes {time}")
    }

    /// Whether the formula of the papers says the same; it knows neither layers nor transfers.
    fn is_as_the_formula(&self) -> bool {
        let costs = &self.costs;
        let [forward, input, weight] =
            [&costs.forward, &costs.backward_input, &costs.backward_weight].map(|stages| stages[0]);
        let knows = self.layout.is_none() && costs.transfer == 0;
        knows && bounds::bubble(&self.schedule.spec, forward, input, weight) == Some(self.timeline.bubble(0))
    }

    fn activations(&self) -> String {
        let peaks = |weight: &dyn Fn(usize) -> u64| {
            let peaks = self.schedule.peak_activations(weight);
            peaks.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
        };
        let unit = if self.schedule.spec.virtual_pipeline > 1 { "chunks" } else { "micro-batches" };
        let mut text = format!("activations in flight, most on each rank: {} {unit}", peaks(&|_| 1));
        if let Some(layout) = &self.layout {
            let layers = layout.layer_counts();
            _ = write!(text, ", {} layers", peaks(&|stage| layers[stage] as u64));
        }
        let received = self.schedule.peak_received().into_iter().max().unwrap_or(0);
        _ = write!(text, "; received and not used yet, at most {received}");
        text + "\n"
    }
}

fn describe(stage: &Stage) -> String {
    let mut parts = Vec::new();
    if stage.embedding {
        parts.push("embedding".to_string());
    }
    match stage.layers.len() {
        0 => {}
        1 => parts.push(format!("layer {}", stage.layers.start)),
        _ => parts.push(format!("layers {}-{}", stage.layers.start, stage.layers.end - 1)),
    }
    if !stage.mtp_layers.is_empty() {
        parts.push("multi-token prediction".into());
    }
    if stage.loss {
        parts.push("loss".into());
    }
    if parts.is_empty() { "nothing".into() } else { parts.join(", ") }
}

impl PipelineArgs {
    fn spec(&self) -> Result<ScheduleSpec> {
        let mut spec = ScheduleSpec::new(self.schedule, self.pipeline_parallel, self.micro_batches);
        if let Some(chunks) = self.virtual_pipeline {
            spec = spec.with_virtual_pipeline(chunks);
        }
        spec.group_size = self.microbatch_group_size;
        spec.forward_only = self.forward_only;
        spec.check()?;
        Ok(spec)
    }
}

impl StageArgs {
    fn layout(&self, spec: &ScheduleSpec) -> Result<Option<StageLayout>> {
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
    fn costs(&self, spec: &ScheduleSpec, layout: Option<&StageLayout>) -> Result<Costs> {
        let &[forward, input, weight] = self.durations.as_slice() else {
            bail!("--durations has {} numbers; three are needed: forward, input, weight", self.durations.len());
        };
        // A whole step has to fit into a number of 64 bits.
        const MOST: Ticks = 1 << 32;
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        args: Args,
    }

    fn report(flags: &str) -> Result<String> {
        let args = Command::try_parse_from(["plan"].into_iter().chain(flags.split_whitespace()))?.args;
        Plan::of(&args)?.report(args.draw.then_some(Colors::Off))
    }

    #[test]
    fn what_1f1b_costs() {
        let expected = "\
1f1b, 4 ranks, micro-batches: 8
bubble: 27.3 % of the step (37.5 % of the computing time); a step takes 33, as the formula says
activations in flight, most on each rank: 4 3 2 1 micro-batches; received and not used yet, at most 2
";
        assert_eq!(report("--schedule 1f1b --pipeline-parallel 4 --micro-batches 8").unwrap(), expected);
    }

    #[test]
    fn megatrons_spellings_are_understood() {
        let ours = "--pipeline-parallel 2 --micro-batches 6 --virtual-pipeline 2 --microbatch-group-size 3 --layers 8 \
                    --count-loss --count-embedding";
        let theirs = "--pipeline-model-parallel-size 2 --micro-batches 6 --num-virtual-stages-per-pipeline-rank 2 \
                      --microbatch-group-size-per-virtual-pipeline-stage 3 --num-layers 8 \
                      --account-for-loss-in-pipeline-split --account-for-embedding-in-pipeline-split";
        let error = report(ours).unwrap_err().to_string();
        assert_eq!(report(theirs).unwrap_err().to_string(), error);
        assert!(error.contains("nearest legal: layers 6, 10"), "{error}");
        assert_eq!(
            report(&ours.replace("layers 8", "layers 6")).unwrap(),
            report(&theirs.replace("layers 8", "layers 6")).unwrap()
        );
    }

    #[test]
    fn stages_are_listed_and_weighed() {
        let report =
            report("--pipeline-parallel 2 --micro-batches 4 --layers 5 --pipeline-layout Et*3|tmtL").unwrap_err();
        assert!(report.to_string().contains("`m` comes after every `t`"), "{report}");
        let flags =
            "--pipeline-parallel 2 --micro-batches 4 --layers 4 --mtp-num-layers 1 --pipeline-layout Et*3|tmL --draw";
        let report = self::report(flags).unwrap();
        assert!(
            report.contains("rank 0: embedding, layers 0-2\n  rank 1: layer 3, multi-token prediction, loss\n"),
            "{report}"
        );
        assert!(report.contains("2 1 micro-batches, 6 1 layers;"), "{report}");
        assert!(report.contains("rank 1  ······F0"), "{report}");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (flags, words) in [
            ("--schedule zb", "none, gpipe, 1f1b, interleaved, zb-h1, zb-v"),
            ("--schedule none --pipeline-parallel 2", "pipeline-parallel 2 does not fit schedule none"),
            ("--durations 1,2", "--durations has 2 numbers"),
            ("--durations 0,1,1", "nearest legal: 1"),
            ("--transfer 99999999999", "too long"),
            ("--pipeline-layout EtL", "--layers"),
            ("--layers 0", "nearest legal: layers 1"),
        ] {
            let error = report(&format!("--micro-batches 4 {flags}")).unwrap_err().to_string();
            assert!(error.contains(words), "{flags}: {error}");
        }
    }

    #[test]
    fn transfers_that_stop_ranks_are_counted() {
        let report = report("--pipeline-parallel 4 --virtual-pipeline 2 --micro-batches 8 --transfer 1").unwrap();
        assert!(report.contains("with transfers stopping both ranks: "), "{report}");
        assert!(!report.contains("formula"), "{report}");
    }

    /// The pictures of docs/schedules.md are what the command there draws.
    #[test]
    fn the_pictures_in_the_documents_are_these() {
        for schedule in ["gpipe", "1f1b", "interleaved --virtual-pipeline 2", "zb-h1", "zb-v"] {
            let flags = format!("plan --pipeline-parallel 4 --micro-batches 8 --schedule {schedule}");
            let plan = Plan::of(&Command::parse_from(flags.split_whitespace()).args).unwrap();
            let name = plan.schedule.spec.kind;
            let file = format!("{}/../docs/schedules/{name}.svg", env!("CARGO_MANIFEST_DIR"));
            let svg = draw::svg(&plan.timeline, &plan.title(), &plan.bubble());
            assert!(fs::read_to_string(&file).unwrap() == svg, "{file} differs: draw it again, see docs/schedules.md");
        }
    }
}
