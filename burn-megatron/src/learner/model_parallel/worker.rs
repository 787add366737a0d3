//! The training loop of one rank.

use std::sync::Arc;
use std::time::Instant;

use backend_dist::comm::Group;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::process::ProcessChannel;
use backend_dist::startup::{self, Phase, phase};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::train::{Interrupter, LearnerEvent, TrainingItem};
use models::CausalLm;
use serde::{Deserialize, Serialize};

use super::batches::{BatchPlace, GlobalBatch};
use super::desk::{Desk, say};
use super::logs::Tracer;
use super::saving::Saves;
use crate::data::TokenDataset;
use crate::engine::{EngineConfig, RankEngine, TokenBatch};
use crate::metrics::{EvalStats, FlopsPerToken, Gauge, RankReading, StepStats, on_gpu, step_memory};
use crate::trace::What;

/// What rank 0 tells all ranks to do next.
#[derive(Clone, Copy, Serialize, Deserialize)]
enum Next {
    Batch(BatchPlace),
    EndOfSplit,
    Stop,
}

/// What a rank trains on and is judged by; every process opens its own.
pub(super) struct Data {
    pub train: Arc<dyn TokenDataset>,
    pub valid: Arc<dyn TokenDataset>,
}

/// What the first rank of a process does to have its process heard, where there are several.
pub(super) struct Voice {
    pub interrupter: Interrupter,
    pub channel: ProcessChannel,
}

/// One rank's engine in the training loop.
pub(super) struct Worker<'a, M> {
    pub rank: &'a Rank,
    pub world: Group,
    pub engine: RankEngine<M>,
    pub config: &'a EngineConfig,
    pub data: &'a Data,
    pub voice: Option<&'a Voice>,
    pub saves: Option<Arc<Saves>>,
    /// The last step that was saved, or that the run began with.
    pub saved: u64,
    pub flops: Option<FlopsPerToken>,
    pub tracer: Tracer<'a>,
    pub gauge: Gauge,
}

impl<M: CausalLm> Worker<'_, M> {
    /// All steps up to the next evaluation; true to stop.
    pub fn train(
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
            let step = self.engine.steps() + 1;
            let mut recorder = self.tracer.recorder(step);
            let (whole, data) = (recorder.begin(), recorder.begin());
            let batch = match self.next(&mut batches, desk.as_deref())? {
                Next::Batch(place) => place.of(&self.data.train),
                Next::EndOfSplit => break,
                Next::Stop => {
                    end_train(epoch, &batches, desk);
                    return Ok(true);
                }
            };
            let rows = phase(Phase::Batch, || self.own_rows(&batch));
            recorder.end(data, What::Data, None, None);
            self.engine.set_recorder(self.tracer.recorder(step));
            let report = phase(Phase::Step, || self.engine.train_micro_batches(&rows))?;
            if let Some(started) = startup::end().filter(|_| desk.is_some()) {
                say(&started.to_string());
            }
            recorder.end(whole, What::Step, None, None);
            let bubble = match recorder.is_on() {
                true => {
                    self.tracer.experts(self.rank, step, self.engine.expert_loads())?;
                    self.tracer.note(self.rank, &self.world, step, [self.engine.take_spans(), recorder.take()])?
                }
                false => None,
            };
            let gpus = self.gpus();
            if self.saves.as_ref().is_some_and(|saves| saves.due(step)) {
                self.save(desk.as_deref_mut())?;
            }
            if let (Some(desk), Some(batches)) = (&mut desk, &batches) {
                let saved = match &self.saves {
                    Some(saves) => desk.saved(saves.finished()?)?,
                    None => None,
                };
                let stats = StepStats {
                    step,
                    loss: report.loss,
                    tokens: report.tokens,
                    grad_norm: report.grad_norm,
                    lr: report.lr,
                    seconds: start.elapsed().as_secs_f64(),
                    memory: gpus
                        .iter()
                        .filter_map(|gpu| gpu.memory)
                        .max()
                        .or_else(|| step_memory(self.world.size()))
                        .unwrap_or(0),
                    ranks: self.world.size() as u64,
                    flops: self.flops,
                    loss_scale: report.loss_scale,
                    skipped: report.skipped,
                    bubble,
                    experts: self.engine.expert_loads().to_vec(),
                    gpus,
                    saved,
                };
                desk.step = step;
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
    pub fn validate(
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
                Next::Batch(place) => place.of(&self.data.valid),
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

    /// Early stopping and burn-train's checkpointing; the decisions of rank 0 are everyone's. True to stop.
    pub fn end_epoch(&mut self, epoch: usize, mut desk: Option<&mut Desk>) -> Result<bool, BoxError> {
        let decision = desk.as_deref_mut().map(|desk| {
            desk.train(LearnerEvent::EndEpoch(epoch));
            desk.flush();
            (desk.should_stop(epoch), desk.should_save(epoch))
        });
        let (stop, save) = self.world.broadcast_host(decision, 0);
        if save {
            self.save(desk)?;
        }
        Ok(stop)
    }

    /// What every rank's GPU has said since the last call; nothing on CPU ranks.
    fn gpus(&mut self) -> Vec<RankReading> {
        if !on_gpu(&self.rank.device) {
            return Vec::new();
        }
        let reading = self.gauge.read_gpu();
        self.gauge.begin();
        self.world.all_gather_host(reading).into_iter().map(Option::unwrap_or_default).collect()
    }

    /// Saves the current step, unless it is saved already. All ranks call it.
    fn save(&mut self, desk: Option<&mut Desk>) -> Result<(), BoxError> {
        let step = self.engine.steps();
        let Some(saves) = self.saves.as_ref().filter(|_| step != self.saved) else { return Ok(()) };
        let stall = saves.submit(self.rank, &self.engine, self.config)?;
        self.saved = step;
        if let Some(desk) = desk {
            desk.stalls.insert(step, stall);
        }
        Ok(())
    }

    /// Saves the last step and waits until it is on disk. A process whose writers are still at work must not end.
    pub fn end(&mut self, mut desk: Option<&mut Desk>) -> Result<(), BoxError> {
        self.save(desk.as_deref_mut())?;
        // All ranks have handed over their parts.
        self.world.barrier();
        if let Some(saves) = self.saves.as_ref().filter(|_| self.rank.leads_process()) {
            let reports = saves.wait()?;
            desk.map(|desk| desk.saved(reports)).transpose()?;
        }
        Ok(())
    }

    /// Rank 0 decides once per step, so all ranks stop at the same one.
    fn next(
        &self,
        batches: &mut Option<Box<dyn DataLoaderIterator<GlobalBatch> + '_>>,
        desk: Option<&Desk>,
    ) -> Result<Next, BoxError> {
        let stops = |voice: &Voice| voice.channel.all_gather(&voice.interrupter.should_stop());
        // A process that is asked to stop may be any; where there is one, rank 0's desk is the one that is asked.
        let asked = self.voice.map(stops).transpose()?.is_some_and(|all| all.contains(&true));
        let mut decision = None;
        if let (Some(desk), Some(batches)) = (desk, batches) {
            decision = Some(match asked || desk.interrupter.should_stop() {
                true => Next::Stop,
                false => batches.next().transpose()?.map_or(Next::EndOfSplit, |batch| Next::Batch(batch.place())),
            });
        }
        Ok(self.world.broadcast_host(decision, 0))
    }

    /// This rank's micro-batches.
    fn own_rows(&self, batch: &GlobalBatch) -> Vec<TokenBatch> {
        self.engine.rows_of_step().into_iter().map(|rows| batch.read(rows)).collect()
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
