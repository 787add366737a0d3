//! Runs the engines of all ranks.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use backend_dist::process::Processes;
use backend_dist::startup::{Phase, phase};
use burn::data::dataloader::DataLoader;
use models::CausalLm;
use parking_lot::Mutex;

use super::batches::{BatchStream, GlobalBatch};
use super::burn_train_bridge::{Records, SaveRequest};
use super::coordinator::Coordinator;
use super::copies::Copies;
use super::local_copies;
use super::logs::{Tracer, say};
use super::placeholder::Megatron;
use super::placement::Placement;
use super::restarts::Restarts;
use super::save_costs::SaveCosts;
use super::saving::{CheckpointOptions, without_host_memory};
use super::settings::{Build, Finish, Settings};
use super::shared::Start;
use super::stragglers::StragglerWatch;
use super::worker::Worker;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::engine::RankEngine;
use crate::learner::report::{Failure, Fit, Fitted, Training};
use crate::metrics::{Gauge, LoadStats, LogFiles};

/// The strategy of a [`Pretraining`](super::Pretraining).
pub(super) struct ModelParallel<M, R> {
    pub settings: Settings,
    pub build: Build<M>,
    /// Of GRPO.
    pub reference: Option<Build<M>>,
    pub finish: Finish<M, R>,
    pub finished: Arc<Mutex<Option<R>>>,
    /// In one process, where it makes them.
    pub copies: Option<Arc<Copies>>,
    pub files: LogFiles,
    pub train: BatchStream,
    pub request: SaveRequest,
    pub records: Option<Records>,
    /// The checkpoint that the run resumes from, or why it cannot be read.
    pub resumed: Result<Option<Arc<Checkpoint>>, CheckpointError>,
}

impl<M: CausalLm, R: Send> Fit<Megatron> for ModelParallel<M, R> {
    fn fit(&self, training: Training<Megatron>) -> Fitted<Megatron> {
        let Training { components, learner, train, valid, .. } = training;
        let (epochs, epoch) = (components.num_epochs, components.checkpoint);
        let interrupter = components.interrupter.clone();
        let coordinator = Mutex::new(Coordinator {
            processor: components.event_processor,
            metrics_ended: false,
            interrupter: components.interrupter,
            early_stopping: components.early_stopping,
            store: components.event_store,
            log: None,
            checkpointer: components.checkpointer,
            learner,
            request: self.request.clone(),
            step: 0,
            bounds: (0, self.settings.steps as u64),
            exit: self.settings.exit,
            newest: None,
            costs: SaveCosts::new(None),
        });
        let several = self.settings.processes.as_ref().filter(|processes| processes.count() > 1);
        let mut restarts = Restarts::new(if several.is_none() { self.settings.restarts.max_restarts } else { 0 });
        let (mut again, mut tracing) = (None, None);
        let mut placement = Placement::new(self.settings.mesh.clone(), &self.settings.devices);
        let failure = loop {
            let processes = several.cloned().unwrap_or_else(|| Processes::alone(&placement.mesh));
            if let Some(timeout) = self.settings.timeout {
                processes.set_timeout(timeout);
            }
            let begins = again.take().map(|from| (from, coordinator.lock().newest.clone()));
            let start = processes.attempt(|| self.start(&processes, epoch, &interrupter, begins));
            let mut start = match start {
                Ok(start) => Start { restarts: restarts.done(), tracing: start.tracing.or(tracing), ..start },
                Err(error) => break Some(Failure { rank: 0, message: error.to_string() }),
            };
            coordinator.lock().newest = start.newest.clone();
            let devices = several.map_or(placement.devices(), |_| &self.settings.devices);
            let launched = processes.launch(devices, |rank| {
                // From the first event to the last.
                let mut coordinator = (rank.rank == 0).then(|| coordinator.lock());
                self.run(&rank, &start, epochs, &*train, &*valid, coordinator.as_deref_mut())
            });
            let failure = match launched {
                Err(failure) => failure,
                Ok(values) => {
                    *self.finished.lock() = values.into_iter().next();
                    start.end_copies();
                    if let Some(local) = &start.local {
                        local_copies::end(local, &processes);
                    }
                    break None;
                }
            };
            tracing = start.tracing.take();
            let next = (&mut restarts, &mut placement);
            let restart = self.restart(&start, &failure, next, &mut coordinator.lock());
            start.end_copies();
            // Gives the folder of checkpoints up.
            drop(start);
            match restart {
                Ok(from) => again = Some(from),
                Err(why) => {
                    let Failure { rank, message } = failure.into();
                    break Some(Failure { rank, message: [message, why].join("\n").trim_end().into() });
                }
            }
        };
        let coordinator = coordinator.into_inner();
        Fitted { model: coordinator.learner.model(), processor: coordinator.processor, failure }
    }
}

impl<M: CausalLm, R: Send> ModelParallel<M, R> {
    /// One rank's part of the run.
    fn run(
        &self,
        rank: &Rank,
        start: &Start,
        epochs: usize,
        train: &dyn DataLoader<GlobalBatch>,
        valid: &dyn DataLoader<GlobalBatch>,
        mut coordinator: Option<&mut Coordinator>,
    ) -> Result<R, BoxError> {
        let world = rank.group(Axis::World);
        let mut engine =
            RankEngine::new(rank, &self.settings.dims, |part| (self.build)(rank, part), self.settings.engine.clone())?;
        if let Some(trouble) = engine.take_offload_trouble() {
            say(&format!("rank {}: not all optimizer states are in host memory: {trouble}", rank.rank));
        }
        let reserves = |options: &CheckpointOptions| options.saver.background && options.saver.pinned_memory;
        if self.settings.checkpoints.as_ref().map_or(self.copies.is_some(), reserves)
            && let Some(trouble) = engine.reserve_host_memory(start.ranks).filter(|_| rank.leads_process())
        {
            say(&without_host_memory(&trouble));
        }
        if let Some(build) = &self.settings.teacher {
            let teacher = phase(Phase::Weights, || build(rank, &|layers| engine.teacher_part(layers)))?;
            engine = engine.with_teacher(teacher);
        }
        if self.settings.engine.grpo.is_some_and(|grpo| grpo.beta > 0.0) {
            let reference = phase(Phase::Weights, || self.reference(rank, &engine))?;
            engine = engine.with_reference(reference);
        }
        self.references(&mut engine, coordinator.is_some())?;
        let from = start.from.lock().clone();
        if let Some(checkpoint) = from.as_deref() {
            let begin = Instant::now();
            let bytes = phase(Phase::Checkpoint, || -> Result<_, BoxError> {
                let read = checkpoint.verify(world.rank(), world.size())?;
                // No rank changes its state before all files are known to be whole.
                let bytes = world.all_gather_host(read).iter().sum();
                engine.restore(checkpoint)?;
                world.barrier();
                Ok(bytes)
            })?;
            if let Some(coordinator) = &mut coordinator {
                coordinator.open_log(&self.files, &self.settings.sinks, engine.steps())?;
                let seconds = begin.elapsed().as_secs_f64();
                let stats = LoadStats { step: engine.steps(), bytes, seconds };
                coordinator.resumed(checkpoint, stats, start.restarts > 0)?;
            }
        } else if let Some(coordinator) = &mut coordinator {
            coordinator.open_log(&self.files, &self.settings.sinks, 0)?;
        }
        // A copy in memory must not outlive the next one.
        drop(from);
        *start.from.lock() = None;
        if let Some(coordinator) = &mut coordinator {
            let last = self.settings.steps as u64;
            let pace = start.saves.as_ref().map(|saves| saves.rehearse(&engine, last)).transpose()?;
            coordinator.costs = SaveCosts::new(pace.flatten());
        }
        let (saves, step) = (start.saves.clone(), engine.steps());
        let tracer = Tracer::new(start.tracing.as_ref());
        let stop_channel = start.stop_channel.as_ref().filter(|_| rank.leads_process());
        let (config, data, faults) = (&self.settings.engine, &self.settings.data, &self.settings.faults);
        let (flops, gauge) = (self.settings.logs.flops, Gauge::new(rank));
        let mut worker = Worker {
            rank,
            world,
            engine,
            config,
            data,
            faults,
            restarts: start.restarts,
            copies: self.copies.as_ref(),
            drawn: None,
            stop_channel,
            saves,
            local: start.local.clone(),
            saved: start.newest.as_ref().map_or(0, |(step, _)| *step),
            attempts: step,
            rolled_back: (step, 0),
            exited: false,
            flops,
            stragglers: self.settings.logs.stragglers.then(|| StragglerWatch::new(rank, start.tracing.is_some())),
            tracer,
            gauge,
            slowed: Duration::ZERO,
        };
        self.epochs(&mut worker, epochs, (train, valid), coordinator.as_deref_mut())?;
        worker.end(coordinator.as_deref_mut())?;
        self.settings.exited.fetch_or(worker.exited, Ordering::Relaxed);
        if let Some(log) = coordinator.and_then(|coordinator| coordinator.log.as_mut()) {
            log.end()?;
        }
        (self.finish)(rank, &mut worker.engine)
    }
}
