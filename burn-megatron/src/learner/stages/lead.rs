//! The first rank of a pipeline, for the loop over batches.

use backend_dist::launch::BoxError;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, TrainStep};

use super::lines::{Line, ended_early};
use super::orders::{Order, Reply};
use super::values::with_values;
use super::{StageRank, StagesModel};
use crate::learner::devices::host;
use crate::learner::loading::load;
use crate::learner::processes::gather_to_first;
use crate::learner::trained::Trained;
use crate::learner::zero::records::concat;

type Output<M> = <M as TrainStep>::Output;
type Input<M> = <M as TrainStep>::Input;

/// The rank's stages, and lines to the other ranks in their order.
pub(super) struct Lead<M: StagesModel> {
    stages: StageRank<M>,
    lines: Vec<Line<M>>,
    valid: Option<M>,
}

impl<M: StagesModel> Lead<M> {
    pub fn new(stages: StageRank<M>, lines: Vec<Line<M>>) -> Self {
        Self { stages, lines, valid: None }
    }

    /// Tells all ranks.
    fn tell(&self, order: impl Fn() -> Order<Input<M>>) {
        for line in &self.lines {
            if !line.tell(order()) {
                ended_early(&self.stages.groups().pp);
            }
        }
    }

    /// What rank `rank` replies; waits for it.
    fn reply(&self, rank: usize) -> Reply<Output<M>> {
        self.lines[rank - 1].reply().unwrap_or_else(|| ended_early(&self.stages.groups().pp))
    }

    /// The outputs of the last stage, `own` if that is here.
    fn outputs(&self, own: Vec<Output<M>>) -> Vec<Output<M>> {
        let division = self.stages.division();
        match division.holder(division.stages() - 1).0 {
            0 => own,
            last => match self.reply(last) {
                Reply::Outputs(outputs) => outputs,
                _ => unreachable!("a rank replies to what it was told"),
            },
        }
    }
}

impl<M: StagesModel> Trained<M> for Lead<M> {
    fn seed(&mut self, base: u64, epoch: usize) {
        self.tell(|| Order::Seed(base, epoch));
        self.stages.seed(base, epoch);
    }

    fn learning_rate(&self) -> ModuleLearningRate {
        self.stages.learner().lr_current()
    }

    fn at_once(&self, accumulation: usize) -> usize {
        accumulation
    }

    fn train(&mut self, batches: Vec<Input<M>>, _: bool) -> Vec<Output<M>> {
        self.valid = None;
        self.tell(|| Order::Train(batches.clone()));
        let own = self.stages.train(batches);
        self.outputs(own)
    }

    fn step(&mut self) {
        self.tell(|| Order::Step);
        self.stages.step();
    }

    fn average_states(&mut self) {
        self.tell(|| Order::AverageStates);
        self.stages.average_states();
    }

    fn begin_valid(&mut self) {
        self.tell(|| Order::BeginEvaluation);
        self.valid = Some(self.stages.valid_model());
    }

    fn valid(&mut self, batch: Input<M>) -> Output<M> {
        self.tell(|| Order::Evaluate(batch.clone()));
        let model = self.valid.as_ref().expect("a validation begins with `begin_valid`");
        let own = self.stages.evaluate(model, batch);
        self.outputs(own.into_iter().collect()).pop().expect("the last stage has an output for every batch")
    }

    fn whole(&mut self, store: &EventStoreClient) -> Result<Option<Learner<M>>, BoxError> {
        self.valid = None;
        self.tell(|| Order::Save);
        let (mut values, own) = self.stages.saved(store)?;
        let mut states = vec![own];
        for rank in 1..=self.lines.len() {
            let Reply::Saved(more, bytes) = self.reply(rank) else {
                unreachable!("a rank replies to what it was told");
            };
            values.extend(more);
            states.push(bytes);
        }
        let Some(saved) = gather_to_first((values, states), &self.stages.groups().dp) else { return Ok(None) };
        let (values, states): (Vec<_>, Vec<_>) = saved.into_iter().unzip();
        let values = values.into_iter().flatten().collect();
        let mut whole = self.stages.learner().clone();
        whole.fork(&host());
        let model = with_values(whole.model(), values);
        load(&mut whole, model.into_record());
        whole.load_optim(concat(states.into_iter().flatten())?);
        Ok(Some(whole))
    }

    fn into_model(self: Box<Self>) -> Result<M, BoxError> {
        self.tell(|| Order::Values);
        let mut values = self.stages.values();
        for rank in 1..=self.lines.len() {
            let Reply::Values(more) = self.reply(rank) else { unreachable!("a rank replies to what it was told") };
            values.extend(more);
        }
        self.tell(|| Order::End);
        let model = self.stages.learner().model();
        let Some(all) = gather_to_first(values, &self.stages.groups().dp) else { return Ok(model) };
        Ok(with_values(model.fork(&host()), all.into_iter().flatten().collect()))
    }
}
