//! The evaluation of one rank between two epochs.

use backend_dist::launch::BoxError;
use burn::data::dataloader::DataLoader;
use burn::train::{LearnerEvent, TrainingItem};
use models::CausalLm;

use super::batches::GlobalBatch;
use super::coordinator::Coordinator;
use super::logs::say;
use super::worker::{Next, Worker};
use crate::eval::table;
use crate::metrics::EvalStats;

impl<M: CausalLm> Worker<'_, M> {
    /// Loss on held-out batches, of the weights or of their average; true to stop.
    pub fn validate(
        &mut self,
        epoch: usize,
        loader: &dyn DataLoader<GlobalBatch>,
        coordinator: Option<&mut Coordinator>,
    ) -> Result<bool, BoxError> {
        let weights = self.engine.enter_average();
        let stop = self.held_out(epoch, loader, coordinator);
        self.engine.leave_average(weights);
        stop
    }

    fn held_out(
        &mut self,
        epoch: usize,
        loader: &dyn DataLoader<GlobalBatch>,
        mut coordinator: Option<&mut Coordinator>,
    ) -> Result<bool, BoxError> {
        let mut batches = coordinator.is_some().then(|| loader.iter());
        if let (Some(coordinator), Some(batches)) = (&mut coordinator, &batches) {
            coordinator.valid(LearnerEvent::StartSplit { epoch_number: epoch, progress: batches.progress() });
        }
        let (mut sum, mut tokens, mut pairs) = (0.0, 0, None);
        let (mut right, mut divergence) = (None::<f64>, None::<f64>);
        let mut stop = false;
        for iteration in 1.. {
            let batch = match self.next(&mut batches, coordinator.as_deref(), false)? {
                Next::Batch { range, .. } => range.of(&self.data.valid),
                Next::EndOfSplit => break,
                Next::Stop | Next::Exit => {
                    stop = true;
                    break;
                }
            };
            let report = self.engine.eval_step(&batch.read(0..batch.sequences())?)?;
            sum += report.loss * report.tokens as f64;
            tokens += report.tokens;
            let with =
                |sum: Option<f64>, mean: Option<f64>| mean.map(|mean| sum.unwrap_or(0.0) + mean * report.tokens as f64);
            (right, divergence) = (with(right, report.accuracy), with(divergence, report.teacher_kl));
            pairs = report.preference.map(|means| means.over(pairs));
            if let (Some(coordinator), Some(batches)) = (&mut coordinator, &batches) {
                let stats = EvalStats {
                    loss: report.loss,
                    tokens: report.tokens,
                    accuracy: report.accuracy,
                    teacher_kl: report.teacher_kl,
                    preference: report.preference,
                };
                let item = TrainingItem::new(stats, batches.progress(), Some(iteration), None);
                coordinator.valid(LearnerEvent::ProcessedItem(item));
            }
        }
        let tasks = self.data.tasks.as_ref().filter(|_| !stop);
        let tasks = tasks.map(|tasks| tasks.evaluate(&mut self.engine)).transpose()?;
        if let (Some(coordinator), Some(batches)) = (coordinator, &batches) {
            coordinator.flush();
            coordinator.valid(LearnerEvent::EndSplit { epoch, progress: batches.progress() });
            coordinator.flush();
            if let Some(log) = coordinator.log.as_mut().filter(|_| tokens > 0 && !stop) {
                let stats = EvalStats {
                    loss: sum / tokens as f64,
                    tokens,
                    accuracy: right.map(|right| right / tokens as f64),
                    teacher_kl: divergence.map(|sum| sum / tokens as f64),
                    preference: pairs,
                };
                log.valid(coordinator.step, &stats)?;
            }
            if let (Some(log), Some(results)) = (coordinator.log.as_mut(), &tasks) {
                log.tasks(coordinator.step, results)?;
                table(results).lines().for_each(say);
            }
        }
        Ok(stop)
    }
}
