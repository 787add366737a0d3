//! The report of a schedule.

use std::fmt::Write;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use super::super::layout::LayoutArgs;
use super::Args;
use crate::schedule::draw::{self, Colors};
use crate::schedule::stages::{Stage, StageLayout};
use crate::schedule::{Costs, Link, Schedule, Timeline, bounds, simulate};

/// Columns of a drawing.
const WIDTH: usize = 120;

/// A schedule with the durations of its passes and its timeline.
pub(super) struct Plan {
    pub(super) schedule: Schedule,
    /// Where the schedule was read from, if it is none of the built-in ones.
    file: Option<PathBuf>,
    layout: Option<StageLayout>,
    costs: Costs,
    pub(super) timeline: Timeline,
}

impl Plan {
    pub(super) fn of(args: &Args) -> Result<Self> {
        args.machine.refuse_without_config()?;
        let LayoutArgs { pipeline_parallel, virtual_pipeline, .. } = args.layout.clone();
        let known = LayoutArgs { pipeline_parallel, virtual_pipeline, ..LayoutArgs::default() };
        if args.layout != known {
            bail!(
                "without a CONFIG only --pipeline-parallel and --virtual-pipeline of the layout have a meaning: name a CONFIG"
            );
        }
        if let Some((key, _)) = args.overrides.0.first() {
            bail!("--{key} is for a run: name its CONFIG, the TOML file");
        }
        if args.pipeline.schedule_file.is_none() && args.pipeline.micro_batches.is_none() {
            bail!(
                "plan needs the CONFIG of a run, a TOML file, or --hf; --micro-batches N simulates a pipeline schedule alone"
            );
        }
        let schedule = args.pipeline.wanted(&args.layout)?;
        let layout = args.stages.layout(&schedule.spec)?;
        let costs = args.durations.costs(&schedule.spec, layout.as_ref())?;
        Ok(Self { file: args.pipeline.schedule_file.clone(), ..Self::new(schedule, layout, costs)? })
    }

    /// Simulates a schedule with these durations.
    pub(super) fn new(schedule: Schedule, layout: Option<StageLayout>, costs: Costs) -> Result<Self> {
        schedule.check().context("a schedule that cannot run was made; this is a bug")?;
        let timeline = simulate(&schedule, &costs, Link::Overlapped)?;
        Ok(Self { schedule, file: None, layout, costs, timeline })
    }

    pub(super) fn report(&self, draw: Option<Colors>) -> Result<String> {
        let mut report = format!("{}\n", self.title());
        if let Some(layout) = &self.layout {
            report += &self.stages(layout);
        }
        if let Some(colors) = draw {
            report += &self.drawing(colors);
        }
        let formula = if self.is_as_the_formula() { ", as by the formula" } else { "" };
        _ = writeln!(report, "{}{formula}", self.bubble());
        for (link, how) in [(Link::InOrder, "serialised on each rank"), (Link::Blocking, "blocking both ranks")] {
            let other = simulate(&self.schedule, &self.costs, link)?.makespan();
            if other > self.timeline.makespan() {
                let longer = 100.0 * (other as f64 / self.timeline.makespan() as f64 - 1.0);
                _ = writeln!(report, "  with transfers {how}: {longer:.1} % longer");
            }
        }
        Ok(report + &self.activations())
    }

    /// The timelines.
    pub(super) fn drawing(&self, colors: Colors) -> String {
        draw::text(&self.timeline, WIDTH, colors)
    }

    pub(super) fn title(&self) -> String {
        let spec = &self.schedule.spec;
        let ranks = match (spec.pipeline_parallel, spec.virtual_pipeline) {
            (1, _) => "1 rank".to_string(),
            (ranks, 1) => format!("{ranks} ranks"),
            (ranks, chunks) => format!("{ranks} ranks of {chunks} chunks"),
        };
        let group = spec.group_size.map_or(String::new(), |size| format!(" in groups of {size}"));
        let only = if spec.forward_only { ", forward only" } else { "" };
        let name = self.file.as_ref().map_or(spec.kind.to_string(), |file| file.display().to_string());
        format!("{name}, {ranks}, micro-batches: {}{group}{only}", spec.micro_batches)
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

    pub(super) fn bubble(&self) -> String {
        let (step, computing) = (100.0 * self.timeline.idle_share(), 100.0 * self.timeline.bubble_ratio());
        let time = self.timeline.makespan();
        format!("bubble: {step:.1} % of the step ({computing:.1} % of the computing time); a step takes {time}")
    }

    /// Whether the formula of the papers gives the same bubble; it knows neither layers nor transfers.
    fn is_as_the_formula(&self) -> bool {
        let costs = &self.costs;
        let [forward, input, weight] =
            [&costs.forward, &costs.backward_input, &costs.backward_weight].map(|stages| stages[0]);
        let knows = self.file.is_none() && self.layout.is_none() && costs.transfer == 0;
        knows && bounds::bubble(&self.schedule.spec, forward, input, weight) == Some(self.timeline.bubble(0))
    }

    fn activations(&self) -> String {
        let peaks = |weight: &dyn Fn(usize) -> u64| {
            let peaks = self.schedule.peak_activations(weight);
            peaks.iter().map(u64::to_string).collect::<Vec<_>>().join(" ")
        };
        let unit = if self.schedule.spec.virtual_pipeline > 1 { "chunks" } else { "micro-batches" };
        let mut text = format!("activations in flight, maximum per rank: {} {unit}", peaks(&|_| 1));
        if let Some(layout) = &self.layout {
            let layers = layout.layer_counts();
            _ = write!(text, ", {} layers", peaks(&|stage| layers[stage] as u64));
        }
        let received = self.schedule.peak_received().into_iter().max().unwrap_or(0);
        _ = write!(text, "; received but not yet used: at most {received}");
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
