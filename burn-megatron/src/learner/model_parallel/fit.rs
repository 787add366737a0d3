//! Runs the engines of all ranks and reports from rank 0.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use backend_dist::comm::Group;
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Axis, Mesh};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::tensor::Device;
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorError, EventProcessorTraining, Interrupter, Learner, LearnerEvent,
    SupervisedTrainingEventProcessor, TrainLoader, TrainingComponents, TrainingItem, ValidLoader,
};
use models::CausalLm;

use super::batches::GlobalBatch;
use super::facade::Megatron;
use crate::engine::{EngineConfig, RankEngine, TokenBatch};
use crate::learner::outcome::{Fit, Fitted};
use crate::metrics::{EvalStats, StepStats, StepsLog, resident_bytes};

pub(super) type Build<M> = Arc<dyn Fn(&Rank) -> Result<M, BoxError> + Send + Sync>;
pub(super) type Finish<M, R> = Arc<dyn Fn(&Rank, &RankEngine<M>) -> Result<R, BoxError> + Send + Sync>;

/// The strategy of a [`Pretraining`](super::Pretraining).
pub(super) struct ModelParallel<M, R> {
    pub mesh: Mesh,
    pub devices: Vec<Device>,
    pub engine: EngineConfig,
    pub build: Build<M>,
    pub finish: Finish<M, R>,
    pub finished: Arc<Mutex<Option<R>>>,
    pub directory: PathBuf,
}

impl<M: CausalLm, R: Send> Fit<Megatron> for ModelParallel<M, R> {
    fn fit(
        &self,
        components: TrainingComponents<Megatron>,
        learner: Learner<Megatron>,
        train: TrainLoader<Megatron>,
        valid: ValidLoader<Megatron>,
        starting_epoch: usize,
    ) -> Fitted<Megatron> {
        let desk = Mutex::new(Desk {
            processor: components.event_processor,
            interrupter: components.interrupter,
            early_stopping: components.early_stopping,
            store: components.event_store,
            log: None,
            step: 0,
        });
        let epochs = starting_epoch..=components.num_epochs;
        let result = launch(&self.mesh, &self.devices, |rank| {
            let engine = RankEngine::new(&rank, (self.build)(&rank)?, self.engine.clone())?;
            let mut worker = Worker { rank: &rank, world: rank.group(Axis::World), engine };
            // Rank 0 alone holds the desk, from the first event to the last.
            let mut desk = (rank.rank == 0).then(|| lock(&desk));
            if let Some(desk) = &mut desk {
                desk.log = Some(StepsLog::open(&self.directory)?);
            }
            let mut desk = desk.as_deref_mut();
            for epoch in epochs.clone() {
                let stop = worker.train(epoch, &*train, desk.as_deref_mut())?
                    || worker.validate(epoch, &*valid, desk.as_deref_mut())?
                    || worker.end_epoch(epoch, desk.as_deref_mut());
                if stop {
                    break;
                }
            }
            (self.finish)(&rank, &worker.engine)
        });
        let processor = desk.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).processor;
        let failure = match result {
            Ok(values) => {
                *lock(&self.finished) = values.into_iter().next();
                None
            }
            Err(failure) => Some(failure),
        };
        Fitted { model: learner.model(), processor, failure }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Everything that only rank 0 does.
struct Desk {
    processor: SupervisedTrainingEventProcessor<Megatron>,
    interrupter: Interrupter,
    early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    store: Arc<EventStoreClient>,
    log: Option<StepsLog>,
    /// Finished optimizer steps.
    step: u64,
}

type Event<T> = LearnerEvent<T>;

impl Desk {
    fn train(&mut self, event: Event<StepStats>) {
        let sent = self.processor.process_train(event);
        self.check(sent);
    }

    fn valid(&mut self, event: Event<EvalStats>) {
        let sent = self.processor.process_valid(event);
        self.check(sent);
    }

    fn flush(&mut self) {
        let flushed = self.processor.flush();
        self.check(flushed);
    }

    /// A metric that fails stops the training through the interrupter.
    fn check(&self, result: Result<(), EventProcessorError>) {
        self.interrupter.fail_on_error(result);
    }
}

/// What rank 0 tells all ranks to do next.
#[derive(Clone)]
enum Next {
    Batch(GlobalBatch),
    EndOfSplit,
    Stop,
}

struct Worker<'a, M> {
    rank: &'a Rank,
    world: Group,
    engine: RankEngine<M>,
}

impl<M: CausalLm> Worker<'_, M> {
    /// All steps up to the next evaluation; true to stop.
    fn train(
        &mut self,
        epoch: usize,
        loader: &dyn DataLoader<GlobalBatch>,
        mut desk: Option<&mut Desk>,
    ) -> Result<bool, BoxError> {
        let mut batches = desk.is_some().then(|| loader.iter());
        if let (Some(desk), Some(batches)) = (&mut desk, &batches) {
            desk.train(LearnerEvent::StartSplit { epoch_number: epoch, progress: batches.progress() });
        }
        for iteration in 1.. {
            let start = Instant::now();
            let batch = match self.next(&mut batches, desk.as_deref())? {
                Next::Batch(batch) => batch,
                Next::EndOfSplit => break,
                Next::Stop => {
                    end_train(epoch, &batches, desk);
                    return Ok(true);
                }
            };
            let report = self.engine.train_micro_batches(&self.own_rows(&batch))?;
            if let (Some(desk), Some(batches)) = (&mut desk, &batches) {
                let stats = StepStats {
                    step: report.step + 1,
                    loss: report.loss,
                    tokens: report.tokens,
                    grad_norm: report.grad_norm,
                    lr: report.lr,
                    seconds: start.elapsed().as_secs_f64(),
                    memory: resident_bytes().unwrap_or(0),
                };
                desk.step = stats.step;
                if let Some(log) = &mut desk.log {
                    log.train(&stats)?;
                }
                let lr = Some(report.lr.into());
                let item = TrainingItem::new(stats, batches.progress(), Some(iteration), lr);
                desk.train(LearnerEvent::ProcessedItem(item));
            }
        }
        end_train(epoch, &batches, desk);
        Ok(false)
    }

    /// Loss on held-out batches; true to stop.
    fn validate(
        &mut self,
        epoch: usize,
        loader: &dyn DataLoader<GlobalBatch>,
        mut desk: Option<&mut Desk>,
    ) -> Result<bool, BoxError> {
        let mut batches = desk.is_some().then(|| loader.iter());
        if let (Some(desk), Some(batches)) = (&mut desk, &batches) {
            desk.valid(LearnerEvent::StartSplit { epoch_number: epoch, progress: batches.progress() });
        }
        let (mut sum, mut tokens) = (0.0, 0);
        let mut stop = false;
        for iteration in 1.. {
            let batch = match self.next(&mut batches, desk.as_deref())? {
                Next::Batch(batch) => batch,
                Next::EndOfSplit => break,
                Next::Stop => {
                    stop = true;
                    break;
                }
            };
            let report = self.engine.eval_step(&batch.read(0..batch.rows()))?;
            sum += report.loss * report.tokens as f64;
            tokens += report.tokens;
            if let (Some(desk), Some(batches)) = (&mut desk, &batches) {
                let stats = EvalStats { loss: report.loss, tokens: report.tokens };
                let item = TrainingItem::new(stats, batches.progress(), Some(iteration), None);
                desk.valid(LearnerEvent::ProcessedItem(item));
            }
        }
        if let (Some(desk), Some(batches)) = (desk, &batches) {
            desk.flush();
            desk.valid(LearnerEvent::EndSplit { epoch, progress: batches.progress() });
            desk.flush();
            if let Some(log) = desk.log.as_mut().filter(|_| tokens > 0 && !stop) {
                log.valid(desk.step, &EvalStats { loss: sum / tokens as f64, tokens })?;
            }
        }
        Ok(stop)
    }

    /// Early stopping; the decision of rank 0 is everyone's.
    fn end_epoch(&self, epoch: usize, desk: Option<&mut Desk>) -> bool {
        let decision = desk.map(|desk| {
            desk.train(LearnerEvent::EndEpoch(epoch));
            desk.flush();
            let Desk { interrupter, early_stopping, store, .. } = desk;
            interrupter.should_stop()
                || early_stopping.as_mut().is_some_and(|strategy| strategy.should_stop(epoch, store))
        });
        self.world.broadcast_host(decision, 0)
    }

    /// Rank 0 decides once per step, so all ranks stop at the same one.
    fn next(
        &self,
        batches: &mut Option<Box<dyn DataLoaderIterator<GlobalBatch> + '_>>,
        desk: Option<&Desk>,
    ) -> Result<Next, BoxError> {
        let mut decision = None;
        if let (Some(desk), Some(batches)) = (desk, batches) {
            decision = Some(match desk.interrupter.should_stop() {
                true => Next::Stop,
                false => batches.next().transpose()?.map_or(Next::EndOfSplit, Next::Batch),
            });
        }
        Ok(self.world.broadcast_host(decision, 0))
    }

    /// This rank's micro-batches.
    fn own_rows(&self, batch: &GlobalBatch) -> Vec<TokenBatch> {
        let plan = self.engine.plan();
        (0..plan.accumulation).map(|micro| batch.read(plan.rows(micro, self.rank.coords.dp))).collect()
    }
}

fn end_train(epoch: usize, batches: &Option<Box<dyn DataLoaderIterator<GlobalBatch> + '_>>, desk: Option<&mut Desk>) {
    if let (Some(desk), Some(batches)) = (desk, batches) {
        let progress: Progress = batches.progress();
        desk.flush();
        desk.train(LearnerEvent::EndSplit { epoch, progress });
        desk.flush();
    }
}
