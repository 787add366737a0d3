//! Trains and measures.

use std::sync::Arc;
use std::time::Instant;

use backend_dist::gpu::profile::{Profile, Session};
use backend_dist::gpu::{MemoryUse, memory_use, release_memory};
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::process::Cluster;
use backend_dist::startup::{self, Phase, Startup, phase};
use burn::data::dataloader::DataLoader;
use models::{CausalLm, ModelConfig, WithModel};
use serde::{Deserialize, Serialize};

use crate::config::RunConfig;
use crate::data::TokenDataset;
use crate::engine::{EngineConfig, RankEngine};
use crate::learner::{BatchStream, Tracer, Tracing};
use crate::metrics::{Gauge, RankReading};
use crate::train::stage_builder;

/// The extent of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Warm-up steps.
    pub warmup: usize,
    /// Steps per run.
    pub steps: usize,
    /// Runs, one after the other in the same process.
    pub runs: usize,
    /// Steps that are profiled after the last run, following one that is not profiled; 0: none.
    #[serde(default)]
    pub profile: usize,
}

impl Timing {
    /// All steps.
    pub fn total(&self) -> usize {
        self.warmup + self.runs * self.steps + if self.profile > 0 { 1 + self.profile } else { 0 }
    }
}

/// The measured values.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Seconds of every step of every run, on rank 0.
    pub steps: Vec<Vec<f64>>,
    /// Seconds of every run, between two moments at which all ranks and devices are idle.
    pub runs: Vec<f64>,
    /// Loss of every step, warm-up steps included.
    pub losses: Vec<f64>,
    /// Readings of every rank's device after the last run; memory is the maximum over all runs.
    pub ranks: Vec<RankReading>,
    /// Memory of every rank's GPU after the last run, by use; empty for CPU ranks.
    pub memory: Vec<MemoryUse>,
    /// Seconds from the launch of the ranks to the end of the first step.
    pub first_step: f64,
    /// How rank 0 started.
    pub startup: Startup,
    /// Profile of the GPUs in the steps after the last run.
    pub profile: Option<Profile>,
}

/// Trains `timing` steps of `config` on `data`. What each process of the cluster has measured on its first rank; a
/// profile is that of the GPUs of the first process. `on_step` is called for
/// every step of rank 0 with its number from 1, its loss and its seconds. `log.trace` has the timeline of some warm-up
/// steps.
///
/// # Errors
/// A layout or a batch that cannot be, or what went wrong on a rank.
pub fn measure(
    config: &RunConfig,
    data: Arc<dyn TokenDataset>,
    cluster: &Cluster,
    timing: Timing,
    on_step: &(dyn Fn(usize, f64, f64) + Sync),
) -> Result<Measured, BoxError> {
    config.model.config.visit(Bench { config, data, cluster, timing, on_step })
}

struct Bench<'a> {
    config: &'a RunConfig,
    data: Arc<dyn TokenDataset>,
    cluster: &'a Cluster,
    timing: Timing,
    on_step: &'a (dyn Fn(usize, f64, f64) + Sync),
}

impl WithModel for Bench<'_> {
    type Output = Result<Measured, BoxError>;

    fn with<M: CausalLm + 'static>(self, sizes: &M::Config) -> Self::Output {
        let mesh = Mesh::new(self.config.parallel.clone())?;
        let build = stage_builder::<M>(sizes, self.config, None, None);
        let dims = sizes.dims();
        let tracing = self.config.log.trace.as_ref().map(|file| Tracing::new(file, 0, self.timing.warmup as u64));
        let tracing = tracing.transpose()?;
        // Every step has the whole batch.
        let engine = EngineConfig { rampup_batch_size: None, ..self.config.engine() };
        let start = Instant::now();
        let seen = self.cluster.launch(&mesh, |rank| {
            let mut engine = RankEngine::new(&rank, &dims, |part| build(&rank, part), engine.clone())?;
            // Figures of a run with less states in host memory would be those of another run.
            if let Some(trouble) = engine.take_offload_trouble() {
                return Err(format!("optimizer.cpu-offload: {trouble}").into());
            }
            self.steps(&rank, engine, start, Tracer::new(tracing.as_ref()))
        })?;
        Ok(seen.into_iter().next().unwrap_or_default())
    }
}

impl Bench<'_> {
    /// All steps of one rank.
    fn steps<M: CausalLm>(
        &self,
        rank: &Rank,
        mut engine: RankEngine<M>,
        start: Instant,
        tracer: Tracer,
    ) -> Result<Measured, BoxError> {
        let (world, timing) = (rank.group(Axis::World), self.timing);
        let stream = BatchStream::advancing(
            self.data.clone(),
            self.config.training.global_batch,
            timing.total(),
            timing.total(),
        );
        let mut batches = stream.iter();
        let mut gauge = Gauge::new(rank);
        let mut seen = Measured::default();
        let mut step = |seen: &mut Measured| -> Result<f64, BoxError> {
            let begin = Instant::now();
            // `train` asks rank 0 before every step whether to continue.
            let continues = world.broadcast_host((rank.rank == 0).then_some(true), 0);
            let own = engine.sequences_of_step();
            let rows = phase(Phase::Batch, || -> Result<Vec<_>, BoxError> {
                let batch = batches.next().filter(|_| continues).ok_or("there are fewer batches than steps")??;
                own.into_iter().map(|rows| batch.read(rows)).collect()
            })?;
            let number = engine.steps() + 1;
            let recorder = tracer.recorder(number);
            let is_traced = recorder.is_on();
            engine.set_recorder(recorder);
            let report = phase(Phase::Step, || engine.train_micro_batches(&rows))?;
            let seconds = begin.elapsed().as_secs_f64();
            if let Some(trouble) = engine.take_activation_trouble() {
                return Err(format!("recompute.cpu-offload: {trouble}").into());
            }
            if is_traced {
                tracer.note(rank, &world, number, [engine.take_spans(), Vec::new()])?;
            }
            seen.losses.push(report.loss);
            if rank.rank == 0 {
                (self.on_step)(seen.losses.len(), report.loss, seconds);
            }
            Ok(seconds)
        };
        let together = || -> Result<Instant, BoxError> {
            rank.device.sync()?;
            world.barrier();
            Ok(Instant::now())
        };
        for index in 0..timing.warmup {
            step(&mut seen)?;
            if index == 0 {
                seen.first_step = start.elapsed().as_secs_f64();
                seen.startup = startup::end().unwrap_or_default();
            }
        }
        let mut most = RankReading::default();
        for _ in 0..timing.runs {
            let begin = together()?;
            gauge.begin();
            let seconds = (0..timing.steps).map(|_| step(&mut seen)).collect::<Result<_, _>>()?;
            seen.runs.push((together()? - begin).as_secs_f64());
            seen.steps.push(seconds);
            most = gauge.read().with_most(most);
        }
        seen.ranks = world.all_gather_host(most);
        seen.memory = world.all_gather_host(memory_use(&rank.device)).into_iter().flatten().collect();
        if timing.profile > 0 {
            // The ranks of a process are profiled together; the first step under a profiler is slow.
            together()?;
            let mut session = if rank.rank == 0 { Some(Session::start()?) } else { None };
            world.barrier();
            step(&mut seen)?;
            together()?;
            session.as_mut().map_or(Ok(()), Session::begin)?;
            world.barrier();
            for _ in 0..timing.profile {
                step(&mut seen)?;
            }
            together()?;
            seen.profile = session.map(Session::end).transpose()?;
            world.barrier();
        }
        // The next layout of this process needs the memory.
        drop((engine, gauge));
        release_memory(&rank.device);
        Ok(seen)
    }
}
