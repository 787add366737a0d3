//! One data-parallel rank as the loop over batches sees it: one model, or the first stage of a pipeline.

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::train::metric::store::EventStoreClient;
use burn::train::{InferenceStep, Learner, LearnerModel, TrainStep};

use backend_dist::launch::BoxError;

use super::dp_rank::DpRank;

/// A rank's model and optimizer. Every data-parallel rank must call the same methods in the same order.
pub(super) trait Trained<M: LearnerModel> {
    /// Begins the random numbers of an epoch.
    fn seed(&mut self, base: u64, epoch: usize);

    fn learning_rate(&self) -> ModuleLearningRate;

    /// Batches that [`train`](Self::train) takes at a time, of the `accumulation` of an optimizer step.
    fn at_once(&self, accumulation: usize) -> usize;

    /// The forward and backward passes of these batches, whose gradients are added up; `are_last` says whether a step
    /// follows for certain.
    fn train(&mut self, batches: Vec<<M as TrainStep>::Input>, are_last: bool) -> Vec<<M as TrainStep>::Output>;

    /// Steps the model with the gradients that were added up.
    fn step(&mut self);

    /// Gives all ranks the mean of their running states.
    fn average_states(&mut self);

    /// Takes the model of now for [`valid`](Self::valid).
    fn begin_valid(&mut self);

    fn valid(&mut self, batch: <M as InferenceStep>::Input) -> <M as InferenceStep>::Output;

    /// The learner with the whole model and the optimizer states of all ranks, on rank 0.
    fn whole(&mut self, store: &EventStoreClient) -> Result<Option<Learner<M>>, BoxError>;

    /// The trained model, whole on rank 0.
    fn into_model(self: Box<Self>) -> Result<M, BoxError>;
}

/// A [`DpRank`] and the model that it validates.
pub(super) struct OneModel<M: LearnerModel> {
    rank: DpRank<M>,
    valid: Option<M>,
}

impl<M: LearnerModel> OneModel<M> {
    pub fn new(rank: DpRank<M>) -> Self {
        Self { rank, valid: None }
    }
}

impl<M: LearnerModel> Trained<M> for OneModel<M> {
    fn seed(&mut self, base: u64, epoch: usize) {
        self.rank.seed(base, epoch);
    }

    fn learning_rate(&self) -> ModuleLearningRate {
        self.rank.learning_rate()
    }

    fn at_once(&self, _: usize) -> usize {
        1
    }

    fn train(&mut self, batches: Vec<<M as TrainStep>::Input>, are_last: bool) -> Vec<<M as TrainStep>::Output> {
        // Else its values, which training changes, would stay next to the new ones.
        self.valid = None;
        let count = batches.len();
        let train = |(index, batch)| {
            let output = self.rank.train_step(batch, are_last && index + 1 == count);
            self.rank.accumulate(output.grads);
            output.item
        };
        batches.into_iter().enumerate().map(train).collect()
    }

    fn step(&mut self) {
        self.rank.step();
    }

    fn average_states(&mut self) {
        self.rank.average_states();
    }

    fn begin_valid(&mut self) {
        self.valid = Some(self.rank.model().valid());
    }

    fn valid(&mut self, batch: <M as InferenceStep>::Input) -> <M as InferenceStep>::Output {
        let model = self.valid.as_ref().expect("a validation begins with `begin_valid`");
        self.rank.valid_step(model, batch)
    }

    fn whole(&mut self, store: &EventStoreClient) -> Result<Option<Learner<M>>, BoxError> {
        self.valid = None;
        self.rank.whole(store)
    }

    fn into_model(self: Box<Self>) -> Result<M, BoxError> {
        self.rank.into_model()
    }
}
