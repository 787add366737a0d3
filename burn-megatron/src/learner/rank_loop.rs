//! What one data-parallel rank does from the first epoch to the last.

use backend_dist::comm::Group;
use backend_dist::launch::BoxError;
use burn::data::dataloader::Progress;
use burn::tensor::Device;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, Learner, LearnerEvent, LearnerModel, LearningCheckpointer,
    TrainLoader, TrainStep, TrainingItem, ValidLoader,
};

use super::dp_rank::DpRank;
use super::gather_outputs::Outbox;
use super::rounds::{aggregate, next, uneven};
use super::shared::Shared;
use super::tensor_parallel::Placing;
use super::trained::{OneModel, Trained};
use super::zero::Zero;

/// Where a rank starts: the learner, and the rank's share of the data.
pub(super) struct RankSetup<M: LearnerModel> {
    pub learner: Learner<M>,
    pub zero: Option<Zero>,
    pub train: TrainLoader<M>,
    pub valid: ValidLoader<M>,
    /// With ZeRO 3: items for a rank that has none left while others have.
    pub filler: Option<ValidLoader<M>>,
    pub checkpointer: Option<LearningCheckpointer<M>>,
    pub early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

impl<M: LearnerModel> RankSetup<M> {
    /// Trains to the end on `device` and returns the model, which is equal on every rank of `group`.
    pub fn run(
        mut self,
        device: &Device,
        group: &Group,
        placing: Option<&Placing<M>>,
        shared: &Shared<M>,
    ) -> Result<M, BoxError> {
        let dp_rank = DpRank::new(self.learner.clone(), device, self.zero.take(), group, placing)?;
        let dp_rank = dp_rank.clipping(shared.max_grad_norm).with_first_ids(shared.ids.clone());
        self.run_as(Box::new(OneModel::new(dp_rank)), device, group, shared)
    }

    /// [`run`](Self::run) of what `trained` makes of the learner, with batches on `device`.
    pub fn run_as(
        self,
        trained: Box<dyn Trained<M>>,
        device: &Device,
        group: &Group,
        shared: &Shared<M>,
    ) -> Result<M, BoxError> {
        let Self { learner, checkpointer, early_stopping, .. } = self;
        drop(learner);
        let inference = device.clone().inner();
        let (train, valid) = (self.train.to_device(device), self.valid.to_device(&inference));
        let filler = self.filler.map(|filler| filler.to_device(&inference));
        let outbox = Outbox::default();
        RankLoop { trained, train, valid, filler, checkpointer, early_stopping, outbox }.run(group, shared)
    }
}

struct RankLoop<M: LearnerModel> {
    trained: Box<dyn Trained<M>>,
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
    filler: Option<ValidLoader<M>>,
    checkpointer: Option<LearningCheckpointer<M>>,
    early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
    outbox: Outbox<<M as TrainStep>::Output>,
}

type Item<M> = TrainingItem<<M as TrainStep>::Output>;

impl<M: LearnerModel> RankLoop<M> {
    fn run(mut self, group: &Group, shared: &Shared<M>) -> Result<M, BoxError> {
        for epoch in shared.epochs.clone() {
            let stop = self.train_epoch(epoch, group, shared)?
                || self.valid_epoch(epoch, group, shared)?
                || self.end_epoch(epoch, group, shared)?;
            if stop {
                break;
            }
        }
        self.trained.into_model()
    }

    fn train_epoch(&mut self, epoch: usize, group: &Group, shared: &Shared<M>) -> Result<bool, BoxError> {
        let first = group.rank() == 0;
        self.trained.seed(shared.seed, epoch);
        let loader = self.train.clone();
        let mut batches = loader.iter();
        let start = aggregate(group, batches.progress());
        if first {
            shared.send(|to| to.process_train(LearnerEvent::StartSplit { epoch_number: epoch, progress: start }));
        }
        let at_once = self.trained.at_once(shared.accumulation);
        let (mut accumulated, mut pushed, mut taken) = (0, 0, Vec::new());
        for iteration in 1.. {
            let (batch, round) = next(&mut *batches, group, &shared.interrupter)?;
            // Every rank has pushed its outputs of previous rounds before it came here; a faster one may have pushed
            // that of this round already.
            self.report_train(std::mem::take(&mut pushed), first, shared);
            shared.keep_together(group);
            if round.ready.contains(&false) && round.ready.contains(&true) && !round.stop {
                return Err(uneven(&round.ready, iteration).into());
            }
            let (Some(batch), false) = (batch, round.stop) else { break };
            taken.push((iteration, round.progress, batch));
            if taken.len() == at_once {
                (accumulated, pushed) = self.train(std::mem::take(&mut taken), accumulated, group, shared);
            }
        }
        // Before the metrics are waited for, which may stop the training.
        self.report_late(0, group, shared);
        if first {
            shared.flush();
        }
        let stop = agree_on_stop(group, shared);
        if !taken.is_empty() && !stop {
            // As many on every rank.
            (accumulated, pushed) = self.train(taken, accumulated, group, shared);
            self.report_late(pushed, group, shared);
        }
        if accumulated > 0 && !stop {
            self.trained.step();
        }
        // Validation, the checkpoint and whoever takes the model read them.
        self.trained.average_states();
        let mut progress = aggregate(group, batches.progress());
        if !stop {
            progress.resolve_total();
        }
        if first {
            shared.send(|to| to.process_train(LearnerEvent::EndSplit { epoch, progress }));
            shared.flush();
        }
        Ok(stop)
    }

    /// Trains on the batches of some iterations, and steps after as many as an optimizer step takes, of which `accumulated`
    /// came before. How many have come since the last step, and how many outputs are pushed.
    fn train(
        &mut self,
        taken: Vec<(usize, Progress, <M as TrainStep>::Input)>,
        accumulated: usize,
        group: &Group,
        shared: &Shared<M>,
    ) -> (usize, usize) {
        let mut accumulated = accumulated + taken.len();
        let (facts, batches): (Vec<_>, _) =
            taken.into_iter().map(|(at, progress, batch)| ((at, progress), batch)).unzip();
        let before = self.trained.learning_rate();
        let outputs = self.trained.train(batches, accumulated == shared.accumulation);
        if accumulated == shared.accumulation {
            self.trained.step();
            accumulated = 0;
        }
        let last = facts.last().map(|(iteration, _)| *iteration);
        let item = |((iteration, progress), output)| {
            let output = if let Some(told) = shared.told { told(output, group) } else { output };
            // On one device the last batch of a step alone has the step's rate.
            let rate = if Some(iteration) == last { self.trained.learning_rate() } else { before.clone() };
            TrainingItem::new(output, progress, Some(iteration), Some(rate))
        };
        let items: Vec<Item<M>> = facts.into_iter().zip(outputs).map(item).collect();
        let items = self.outbox.pass(items, shared.gather.as_ref(), !shared.waits_in_operations, group);
        let pushed = items.len();
        shared.push(items, self.outbox.travels(), group);
        (accumulated, pushed)
    }

    /// Hands outputs to the metrics that were kept, after `pushed` others.
    fn report_late(&mut self, pushed: usize, group: &Group, shared: &Shared<M>) {
        let late = self.outbox.take();
        let pushed = pushed + late.len();
        shared.push(late, self.outbox.travels(), group);
        if pushed > 0 {
            // Every rank of this process has pushed its own.
            group.barrier();
            self.report_train(pushed, group.rank() == 0, shared);
        }
    }

    /// Hands the oldest `pushed` outputs of every rank to the metrics.
    fn report_train(&self, pushed: usize, first: bool, shared: &Shared<M>) {
        for _ in 0..if first { pushed } else { 0 } {
            for item in shared.trained.take() {
                shared.send(|to| to.process_train(LearnerEvent::ProcessedItem(item)));
            }
        }
    }

    fn report_valid(&self, first: bool, shared: &Shared<M>) {
        if first {
            for item in shared.validated.take() {
                shared.send(|to| to.process_valid(LearnerEvent::ProcessedItem(item)));
            }
        }
    }

    fn valid_epoch(&mut self, epoch: usize, group: &Group, shared: &Shared<M>) -> Result<bool, BoxError> {
        let first = group.rank() == 0;
        self.trained.begin_valid();
        let mut batches = self.valid.iter();
        let start = aggregate(group, batches.progress());
        if first {
            shared.send(|to| to.process_valid(LearnerEvent::StartSplit { epoch_number: epoch, progress: start }));
        }
        for iteration in 1.. {
            let (batch, round) = next(&mut *batches, group, &shared.interrupter)?;
            if iteration > 1 {
                self.report_valid(first, shared);
                shared.keep_together(group);
            }
            if round.stop || !round.ready.contains(&true) {
                break;
            }
            // Shares of the validation set may differ by a batch: only with ZeRO 3 there are collectives inside one.
            if let Some(batch) = batch {
                let output = self.trained.valid(batch);
                let item = TrainingItem::new(output, round.progress, Some(iteration), None);
                if shared.reports {
                    shared.validated.push(group.rank(), item);
                }
            } else if let Some(filler) = &self.filler {
                let batch = filler.iter().next().transpose()?.ok_or("the validation set has no first item")?;
                let _ = self.trained.valid(batch);
            }
        }
        if first {
            shared.flush();
        }
        let stop = agree_on_stop(group, shared);
        let mut progress = aggregate(group, batches.progress());
        if !stop {
            progress.resolve_total();
        }
        if first {
            shared.send(|to| to.process_valid(LearnerEvent::EndSplit { epoch, progress }));
            shared.flush();
        }
        Ok(stop)
    }

    /// Checkpoint and early stopping on rank 0; the decision is everyone's.
    fn end_epoch(&mut self, epoch: usize, group: &Group, shared: &Shared<M>) -> Result<bool, BoxError> {
        let learner = if shared.checkpoints { self.trained.whole(&shared.store)? } else { None };
        let decision = (group.rank() == 0).then(|| {
            shared.send(|to| to.process_train(LearnerEvent::EndEpoch(epoch)));
            shared.flush();
            if shared.interrupter.should_stop() {
                return true;
            }
            if let (Some(checkpointer), Some(learner)) = (&mut self.checkpointer, &learner) {
                checkpointer.checkpoint(learner, epoch, &shared.store);
            }
            self.early_stopping.as_mut().is_some_and(|strategy| strategy.should_stop(epoch, &shared.store))
        });
        Ok(group.broadcast_host(decision, 0))
    }
}

fn agree_on_stop<M: LearnerModel>(group: &Group, shared: &Shared<M>) -> bool {
    group.all_gather_host(shared.interrupter.should_stop()).contains(&true)
}
