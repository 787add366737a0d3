//! The training loop of one rank.

mod saving;

use std::sync::Arc;
use std::time::{Duration, Instant};

use backend_dist::comm::Group;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::process::ProcessChannel;
use backend_dist::startup::{self, Phase, phase};
use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::train::{Interrupter, LearnerEvent, TrainingItem};
use models::CausalLm;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::batches::{BatchRange, GlobalBatch};
use super::coordinator::Coordinator;
use super::copies::Copies;
use super::faults::Faults;
use super::logs::{Tracer, say};
use super::rollouts::{Drawn, GrpoRun};
use super::saving::{Description, Saves, run_state};
use super::stragglers::{StragglerWatch, slow_down};
use crate::data::TokenDataset;
use crate::engine::{AnomalyAction, EngineConfig, RankEngine, TokenBatch};
use crate::eval::TrainingTasks;
use crate::grpo::GrpoMeans;
use crate::metrics::{FlopsPerToken, Gauge, RankReading, StepStats, on_gpu, step_memory};
use crate::trace::SpanKind;

/// What rank 0 tells all ranks to do next.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum Next {
    /// Train on this batch, or validate; `save` after it.
    Batch {
        range: BatchRange,
        save: bool,
    },
    EndOfSplit,
    Stop,
    /// The run ends as its configuration says.
    Exit,
}

/// Why the training of an epoch has ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Epoch,
    Stop,
    /// A bad step; the run is to continue from the newest checkpoint.
    RollBack,
}

/// What a rank trains on and is evaluated on; every process opens its own.
#[derive(Clone)]
pub(super) struct Data {
    pub train: Arc<dyn TokenDataset>,
    pub valid: Arc<dyn TokenDataset>,
    pub tasks: Option<Arc<TrainingTasks>>,
    pub grpo: Option<GrpoRun>,
}

/// How a process tells the others that it was asked to stop, where there are several.
pub(super) struct StopChannel {
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
    pub faults: &'a Faults,
    /// How often the run has begun before, within this process.
    pub restarts: usize,
    pub copies: Option<&'a Arc<Copies>>,
    /// The last completions of GRPO.
    pub drawn: Option<Drawn>,
    pub stop_channel: Option<&'a StopChannel>,
    pub saves: Option<Arc<Saves>>,
    /// Copies that outlive the processes.
    pub local: Option<Arc<Saves>>,
    /// The last step that the run has on disk, or 0.
    pub saved: u64,
    /// Steps, also those that were taken back by going back to a checkpoint.
    pub attempts: u64,
    /// The step of the checkpoint that the run went back to last, and how often one after the other.
    pub rolled_back: (u64, usize),
    /// The run has ended as [`ExitOptions`](super::exit::ExitOptions) say.
    pub exited: bool,
    pub flops: Option<FlopsPerToken>,
    /// Where ranks that others wait for are named.
    pub stragglers: Option<StragglerWatch>,
    pub tracer: Tracer<'a>,
    pub gauge: Gauge,
    /// How much longer a fault lets the GPU take for the next step.
    pub slowed: Duration,
}

impl<M: CausalLm> Worker<'_, M> {
    /// All steps up to the next evaluation.
    pub fn train(
        &mut self,
        epoch: usize,
        loader: &dyn DataLoader<GlobalBatch>,
        mut coordinator: Option<&mut Coordinator>,
    ) -> Result<End, BoxError> {
        let mut batches = coordinator.is_some().then(|| loader.iter());
        if let (Some(coordinator), Some(batches)) = (&mut coordinator, &batches) {
            coordinator.train(LearnerEvent::StartSplit { epoch_number: epoch, progress: batches.progress() });
        }
        for iteration in 1.. {
            let start = Instant::now();
            let step = self.engine.steps() + 1;
            let mut recorder = self.tracer.recorder(step);
            let (whole, data) = (recorder.begin(), recorder.begin());
            let (batch, save) = match self.next(&mut batches, coordinator.as_deref(), true)? {
                Next::Batch { range, save } => (range.of(&self.data.train), save),
                Next::EndOfSplit => break,
                Next::Stop | Next::Exit => {
                    end_train(epoch, &batches, coordinator);
                    return Ok(End::Stop);
                }
            };
            let micro_batches = phase(Phase::Batch, || self.micro_batches(&batch))?;
            recorder.end(data, SpanKind::Data, None, None);
            self.engine.set_recorder(self.tracer.recorder(step));
            self.faults.before(self.rank.rank, step, self.restarts)?;
            self.attempts += 1;
            if self.faults.is_nan(self.attempts) {
                self.engine.poison();
            }
            let report = phase(Phase::Step, || match &self.drawn {
                None => self.engine.train_micro_batches(&micro_batches),
                Some(drawn) => self.engine.train_rollouts(&micro_batches, &drawn.rollouts),
            })?;
            if let Some(trouble) = self.engine.take_activation_trouble() {
                let rank = self.rank.rank;
                say(&format!("rank {rank}: not all inputs of recomputed layers are in host memory: {trouble}"));
            }
            let seconds = (report.seconds - self.slowed.as_secs_f64()).max(0.0);
            self.slowed = slow_down(&self.rank.device, self.faults.delay(self.rank.rank, seconds));
            let rewards = self.drawn.as_ref().map(|drawn| drawn.stats);
            if let Some(started) = startup::end().filter(|_| coordinator.is_some()) {
                say(&started.to_string());
            }
            recorder.end(whole, SpanKind::Step, None, None);
            let bubble = match recorder.is_on() {
                true => {
                    self.tracer.experts(self.rank, step, self.engine.expert_loads())?;
                    self.tracer.note(self.rank, &self.world, step, [self.engine.take_spans(), recorder.take()])?
                }
                false => None,
            };
            let gpus = self.gpus();
            let slow = self.stragglers.as_mut().and_then(|watch| watch.step(self.rank, &self.world));
            if let Some(line) = slow.filter(|_| coordinator.is_some()) {
                say(&line);
            }
            if let (Some(coordinator), Some(batches)) = (&mut coordinator, &batches) {
                let saved = match &self.saves {
                    Some(saves) => {
                        saves.copied().iter().for_each(|line| say(line));
                        coordinator.saved(saves.finished()?)?
                    }
                    None => None,
                };
                let gradients = self.engine.gradient_stats();
                let norms = gradients.norms.iter();
                let stats = StepStats {
                    step,
                    loss: report.loss,
                    tokens: report.tokens,
                    computed_tokens: (batch.sequences() * micro_batches.first().map_or(0, |micro| micro.seq)) as u64,
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
                    grad_norms: norms.map(|(name, norm)| (format!("grad_norm/{name}"), *norm)).collect(),
                    num_zeros_in_grad: gradients.zeros,
                    max_attention_logit: report.max_attention_logit,
                    experts: self.engine.expert_loads().to_vec(),
                    preference: report.preference,
                    teacher_kl: report.teacher_kl,
                    grpo: rewards.zip(report.grpo).map(|(rewards, sums)| GrpoMeans::of(&rewards, &sums)),
                    gpus,
                    saved,
                };
                if let Some((anomaly, _)) = report.anomaly {
                    say(&format!("step {step} is skipped: {anomaly}; {batch}"));
                }
                coordinator.step = step;
                if let Some(log) = &mut coordinator.log {
                    log.train(&stats)?;
                }
                let lr = Some(report.lr.into());
                let item = TrainingItem::new(stats, batches.progress(), Some(iteration), lr);
                coordinator.train(LearnerEvent::ProcessedItem(item));
            }
            if report.anomaly.is_some_and(|(_, action)| action == AnomalyAction::RollBack) {
                end_train(epoch, &batches, coordinator);
                return Ok(End::RollBack);
            }
            // After the step is in the log: a run that is killed in between does it again.
            if save || self.saves.as_ref().is_some_and(|saves| saves.due(step)) {
                self.save(coordinator.as_deref_mut())?;
            } else if self.local.as_ref().is_some_and(|local| local.due(step)) {
                self.copy_locally()?;
            } else if let Some(copies) = self.copies.filter(|copies| copies.due(step)) {
                let state = run_state(self.rank, &self.engine, self.config, &Description::default(), &Value::Null);
                copies.add(state, self.engine.snapshot());
                self.tell_host_trouble();
            }
        }
        end_train(epoch, &batches, coordinator);
        Ok(End::Epoch)
    }

    /// The reading of every rank's GPU since the last call; nothing on CPU ranks.
    fn gpus(&mut self) -> Vec<RankReading> {
        if !on_gpu(&self.rank.device) {
            return Vec::new();
        }
        let reading = self.gauge.read_gpu();
        self.gauge.begin();
        self.world.all_gather_host(reading).into_iter().map(Option::unwrap_or_default).collect()
    }

    /// Rank 0 decides once per step, so all ranks stop at the same one, and save after the same ones. A run whose time is
    /// over (`exits`) evaluates first where an evaluation is due.
    pub fn next(
        &mut self,
        batches: &mut Option<Box<dyn DataLoaderIterator<GlobalBatch> + '_>>,
        coordinator: Option<&Coordinator>,
        exits: bool,
    ) -> Result<Next, BoxError> {
        let stops =
            |stop_channel: &StopChannel| stop_channel.channel.all_gather(&stop_channel.interrupter.should_stop());
        // Any process may be asked to stop; where there is one, its interrupter is rank 0's.
        let asked = self.stop_channel.map(stops).transpose()?.is_some_and(|all| all.contains(&true));
        let mut decision = None;
        if let (Some(coordinator), Some(batches)) = (coordinator, batches) {
            let progress = batches.progress();
            let is_between = progress.total != Some(progress.items_processed);
            decision = Some(match asked || coordinator.interrupter.should_stop() {
                true => Next::Stop,
                false if exits && is_between && coordinator.is_over() => Next::Exit,
                false => batches.next().transpose()?.map_or(Next::EndOfSplit, |batch| Next::Batch {
                    range: batch.range(),
                    save: coordinator.costs.is_due(),
                }),
            });
        }
        let next = self.world.broadcast_host(decision, 0);
        self.exited |= matches!(next, Next::Exit);
        Ok(next)
    }

    /// This rank's micro-batches; those of GRPO are drawn first, unless the step trains on those of the step before.
    fn micro_batches(&mut self, batch: &GlobalBatch) -> Result<Vec<TokenBatch>, BoxError> {
        let Some((grpo, config)) = self.data.grpo.as_ref().zip(self.config.grpo.as_ref()) else {
            let own = self.engine.sequences_of_step().into_iter().map(|range| batch.read(range));
            return own.collect();
        };
        let wanted = grpo.batch(config, batch.range().first(), batch.sequences());
        if self.drawn.as_ref().is_none_or(|drawn| drawn.batch != wanted) {
            self.drawn = Some(grpo.draw(self.rank, &mut self.engine, config, wanted)?);
        }
        Ok(self.drawn.as_ref().map(|drawn| drawn.micro_batches.clone()).unwrap_or_default())
    }
}

fn end_train(
    epoch: usize,
    batches: &Option<Box<dyn DataLoaderIterator<GlobalBatch> + '_>>,
    coordinator: Option<&mut Coordinator>,
) {
    if let (Some(coordinator), Some(batches)) = (coordinator, batches) {
        let progress: Progress = batches.progress();
        coordinator.flush();
        coordinator.train(LearnerEvent::EndSplit { epoch, progress });
        coordinator.flush();
    }
}
