//! What a run writes down of its steps, and the timeline of a few of them.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use backend_dist::comm::Group;
use backend_dist::launch::{Rank, mesh_position};
use backend_dist::mesh::{Axis, Mesh};
use parking_lot::Mutex;

use crate::console::{self, dashboard_possible};
use crate::engine::ExpertLoad;
use crate::metrics::{FlopsPerToken, LogFiles, RunInfo, expert_map};
use crate::trace::{Lane, Recorder, Span, idle_share, summaries, summary_file, write_chrome};

/// A line of the run's log, and of the console where there is no dashboard.
pub(super) fn say(line: &str) {
    log::info!("{line}");
    if !dashboard_possible() {
        console::say(line);
    }
}

/// What is logged, and where.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let logs = LogOptions { tensorboard: Some("runs/example/board".into()), ..LogOptions::default() };
/// assert_eq!(logs.jsonl, None, "steps.jsonl in the folder of the run");
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogOptions {
    /// File with a JSON object per step; `None` for `steps.jsonl` in the folder of the run.
    pub jsonl: Option<PathBuf>,
    /// Folder for TensorBoard's event files, if they are wanted.
    pub tensorboard: Option<PathBuf>,
    /// Folder for Weights & Biases' offline runs, which `wandb sync` takes, if they are wanted.
    pub wandb: Option<PathBuf>,
    /// MLflow's file store, which `mlflow ui --backend-store-uri` shows, if it is wanted.
    pub mlflow: Option<PathBuf>,
    /// Name and configuration of the run, for both.
    pub run: RunInfo,
    /// File for the timeline of all ranks in the third to the fifth step, if it is wanted. <https://ui.perfetto.dev>
    /// opens it. A text file next to it says how much of each rank's communication overlapped with computation, and a
    /// picture (`.experts.svg`) how full the experts were.
    pub trace: Option<PathBuf>,
    /// Whether ranks that others wait for are named, every ten steps. On GPUs it is the time of the hosts that is known.
    pub stragglers: bool,
    /// What a token costs, for teraflops and MFU.
    pub flops: Option<FlopsPerToken>,
}

impl LogOptions {
    /// The files of a run that has this folder.
    pub(super) fn files(&self, folder: &Path) -> LogFiles {
        let LogFiles { jsonl, .. } = LogFiles::within(folder);
        LogFiles {
            jsonl: self.jsonl.clone().unwrap_or(jsonl),
            tensorboard: self.tensorboard.clone(),
            wandb: self.wandb.clone(),
            mlflow: self.mlflow.clone(),
            run: self.run.clone(),
        }
    }
}

/// Which steps are traced, the same on all ranks.
pub(crate) struct Tracing {
    file: PathBuf,
    origin: Instant,
    /// The same moment as all processes call it: nanoseconds since 1970.
    wall_clock: u64,
    steps: RangeInclusive<u64>,
    /// The timelines of all ranks, of rank 0; they outlive ranks that begin again.
    lanes: Mutex<Vec<Lane>>,
}

impl Tracing {
    /// Traces three steps after two that warm up, or the last ones of a run that has fewer. `done` steps of `total` are
    /// done already.
    pub fn new(file: &Path, done: u64, total: u64) -> io::Result<Self> {
        let last = total.min(done + 5);
        let wall_clock = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_err(io::Error::other)?;
        let (file, origin, wall_clock) = (file.into(), Instant::now(), wall_clock.as_nanos() as u64);
        Ok(Self { file, origin, wall_clock, steps: last.min(done + 3)..=last, lanes: Mutex::default() })
    }

    /// Writes the file anew. Fails if it cannot be written.
    pub fn write(&self, lanes: &[Lane]) -> io::Result<()> {
        let write = || {
            if let Some(folder) = self.file.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let mut out = BufWriter::new(File::create(&self.file)?);
            write_chrome(&mut out, lanes)?;
            out.flush()?;
            std::fs::write(summary_file(&self.file), summaries(lanes))
        };
        write().map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", self.file.display())))
    }
}

/// Where the load of the experts is drawn: `trace.json.experts.svg` for `trace.json`.
fn expert_file(timeline: &Path) -> PathBuf {
    let mut name = timeline.as_os_str().to_owned();
    name.push(".experts.svg");
    name.into()
}

/// A rank's part in the tracing.
pub(crate) struct Tracer<'a> {
    tracing: Option<&'a Tracing>,
}

impl<'a> Tracer<'a> {
    pub fn new(tracing: Option<&'a Tracing>) -> Self {
        Self { tracing }
    }

    /// A recorder that is on if the step is traced.
    pub fn recorder(&self, step: u64) -> Recorder {
        match self.tracing.filter(|tracing| tracing.steps.contains(&step)) {
            Some(tracing) => Recorder::new(tracing.origin),
            None => Recorder::off(),
        }
    }

    /// Draws how full the experts were in a traced step; rank 0 writes the file anew with every one of them.
    pub fn experts(&self, rank: &Rank, step: u64, loads: &[ExpertLoad]) -> io::Result<()> {
        let (0, Some(tracing), false) = (rank.rank, self.tracing, loads.is_empty()) else { return Ok(()) };
        let copies: u64 = loads.iter().flat_map(|load| &load.tokens).sum();
        let below =
            format!("step {step}, {copies} copies of tokens over all layers, relative to the mean of the layer");
        let file = expert_file(&tracing.file);
        let written = std::fs::write(&file, expert_map(loads, "Load of the experts", &below));
        written.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", file.display())))
    }

    /// Notes what this rank did in a traced step; all ranks call it. Rank 0 writes the file anew, so that it is whole
    /// however the run ends. Returns the share of the step in which pipeline ranks did not compute, if there is a
    /// pipeline.
    pub fn note(&self, rank: &Rank, world: &Group, step: u64, spans: [Vec<Span>; 2]) -> io::Result<Option<f64>> {
        let origin = self.tracing.map_or(0, |tracing| tracing.wall_clock);
        let ranks = on_one_clock(world.all_gather_host((origin, spans.concat())));
        let bubble = bubble(&rank.mesh, &ranks);
        if let (0, Some(tracing)) = (rank.rank, self.tracing) {
            let mut lanes = tracing.lanes.lock();
            lanes.resize_with(ranks.len(), || Lane { process: 0, rank: 0, name: String::new(), steps: Vec::new() });
            for (index, (lane, spans)) in lanes.iter_mut().zip(ranks).enumerate() {
                let place = Some(mesh_position(&rank.mesh, index)).filter(|place| !place.is_empty());
                lane.rank = index;
                lane.name = format!("rank {index}{}", place.map(|place| format!(" ({place})")).unwrap_or_default());
                // Done again after a restart.
                lane.steps.retain(|(traced, _)| *traced < step);
                lane.steps.push((step, spans));
            }
            tracing.write(&lanes)?;
        }
        Ok(bubble)
    }
}

/// Spans from the origin of rank 0's process. Hosts whose clocks differ stay apart by the difference.
fn on_one_clock(ranks: Vec<(u64, Vec<Span>)>) -> Vec<Vec<Span>> {
    let first = ranks.first().map_or(0, |(origin, _)| *origin);
    let shifted = |(origin, spans): (u64, Vec<Span>)| {
        let shift = |at: u64| (at + origin).saturating_sub(first);
        spans.into_iter().map(|span| Span { start: shift(span.start), end: shift(span.end), ..span }).collect()
    };
    ranks.into_iter().map(shifted).collect()
}

/// The mean over all pipelines; none without stages.
fn bubble(mesh: &Mesh, ranks: &[Vec<Span>]) -> Option<f64> {
    let first_stage = |rank: &usize| mesh.layout().pp > 1 && mesh.coords(*rank).pp == 0;
    let shares = (0..ranks.len()).filter(first_stage).filter_map(|rank| {
        let stages = mesh.group_of(Axis::Pp, rank);
        idle_share(&stages.iter().map(|&stage| &ranks[stage][..]).collect::<Vec<_>>())
    });
    let shares: Vec<f64> = shares.collect();
    (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
}

#[cfg(test)]
mod tests {
    use backend_dist::mesh::ParallelLayout;

    use super::*;
    use crate::trace::{SpanKind, Track};

    fn compute(start: u64, end: u64) -> Vec<Span> {
        vec![Span { kind: SpanKind::Forward, chunk: None, micro_batch: None, start, end, track: Track::Host }]
    }

    #[test]
    fn the_bubble_is_the_mean_over_the_pipelines() {
        let mesh = |pp, dp| Mesh::new(ParallelLayout { pp, dp, ..Default::default() }).unwrap();
        // Ranks 0 and 2 are one pipeline, 1 and 3 the other.
        let ranks = [compute(0, 10), compute(100, 130), compute(10, 20), compute(110, 140)];
        let seen = bubble(&mesh(2, 2), &ranks).unwrap();
        assert!((seen - (1.0 / 2.0 + 1.0 / 4.0) / 2.0).abs() < 1e-12, "{seen}");
        assert_eq!(bubble(&mesh(1, 4), &ranks), None);
    }

    #[test]
    fn three_steps_are_traced_or_the_last_ones() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("new/trace.json");
        let steps = |done, total| Tracing::new(&file, done, total).unwrap().steps;
        let at = |start, end| compute(start, end)[0];
        let two = on_one_clock(vec![(1000, vec![at(5, 8)]), (1100, vec![at(5, 8)]), (900, vec![at(50, 200)])]);
        assert_eq!(two, [[at(5, 8)], [at(105, 108)], [at(0, 100)]]);
        assert_eq!((steps(0, 100), steps(40, 100), steps(0, 4), steps(0, 2)), (3..=5, 43..=45, 3..=4, 2..=2));
        let tracing = Tracing::new(&file, 0, 100).unwrap();
        let tracer = Tracer::new(Some(&tracing));
        assert_eq!([2, 3, 5, 6].map(|step| tracer.recorder(step).is_on()), [false, true, true, false]);
        assert!(!Tracer::new(None).recorder(3).is_on());
        let error = Tracing::new(folder.path(), 0, 100).unwrap().write(&[]).unwrap_err().to_string();
        assert!(error.contains(&*folder.path().to_string_lossy()), "{error}");
    }
}
