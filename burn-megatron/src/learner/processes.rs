//! A training over several processes: each hosts some of the ranks, all begin with the model of the first, and all end
//! with the model that was trained.

use backend_dist::comm::Group;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Mesh;
use backend_dist::process::{ProcessChannel, ProcessWorld, Processes};
use burn::module::Module;
use burn::store::ModuleRecord;
use burn::tensor::Bytes;
use burn::train::{Learner, LearnerModel, TrainLoader, TrainingComponents, ValidLoader};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::devices::host;
use super::ids::{FirstIds, Ids};
use super::loading::{load, loaded};

/// How many processes the launcher has started; 1 where it says nothing that can be understood, which
/// [`Together::join`] reports.
pub(super) fn count() -> usize {
    ProcessWorld::from_env().ok().flatten().map_or(1, |world| world.processes)
}

/// What the first process tells the others before the first step.
#[derive(Serialize, Deserialize)]
struct Start {
    model: Bytes,
    ids: Ids,
    seed: u64,
}

/// The processes of one training.
pub(super) struct Together {
    processes: Processes,
    /// What the first process has trained.
    trained: ProcessChannel,
    received: Mutex<Option<Bytes>>,
}

impl Together {
    /// Waits for the other processes that the launcher has started, if it has. They must be about to do the same.
    pub fn join<M: LearnerModel>(
        mesh: &Mesh,
        components: &TrainingComponents<M>,
        (train, valid): (&TrainLoader<M>, &ValidLoader<M>),
    ) -> Result<Self, BoxError> {
        let agreement = [
            ("epochs", components.num_epochs.to_string()),
            ("the checkpoint of epoch", components.checkpoint.unwrap_or(0).to_string()),
            ("batches of a step", components.grad_accumulation.unwrap_or(1).to_string()),
            ("training items", train.num_items().to_string()),
            ("validation items", valid.num_items().to_string()),
        ];
        let processes = Processes::from_env(mesh, &agreement)?;
        let trained = processes.channel("the trained model");
        Ok(Self { processes, trained, received: Mutex::default() })
    }

    pub fn processes(&self) -> &Processes {
        &self.processes
    }

    /// Refuses pipelines whose ranks are in several processes, unless they can be.
    pub fn check_pipelines(&self, can_be: bool) -> Result<(), BoxError> {
        let (layout, count) = (self.processes.mesh().layout(), self.processes.count());
        if can_be || layout.pp <= 1 || layout.dp.is_multiple_of(count) {
            return Ok(());
        }
        let nearest = (1..count).rev().find(|count| layout.dp.is_multiple_of(*count)).unwrap_or(1);
        let why = "batches and outputs of the model's own types go from thread to thread between the stages";
        let or = "or .stages().across_processes()";
        Err(format!("layout {layout} over {count} processes: {why}; nearest legal: {nearest} processes, {or}").into())
    }

    /// Gives `learner`, in host memory, the values of the first process; the first's seed and ids too.
    pub fn share<M: LearnerModel>(&self, learner: &mut Learner<M>, seed: u64) -> Result<(u64, FirstIds), BoxError> {
        if self.processes.count() == 1 {
            return Ok((seed, FirstIds::default()));
        }
        learner.fork(&host());
        let own = Ids::of(&learner.model());
        let start = || Ok(Start { model: learner.model().into_record().into_bytes()?, ids: own.clone(), seed });
        let start = self.processes.from_first::<_, BoxError>("the model of the first process", start)?;
        self.processes.attempt(|| {
            let record = ModuleRecord::from_bytes(start.model)?;
            // Before `load`, which panics where the processes have different models.
            let model = loaded(learner.model(), record).map_err(|error| {
                format!("the model of process {} is not that of the first: {error}", self.processes.process())
            })?;
            load(learner, own.given_to(model).into_record());
            Ok::<_, BoxError>(())
        })?;
        let first = if self.processes.is_first() { FirstIds::default() } else { FirstIds::new(own, start.ids) };
        Ok((start.seed, first))
    }

    /// Gives all processes the model that rank 0 has trained. Every rank must call it, at its end.
    pub fn end<M: Module>(&self, rank: &Rank, model: &Option<M>) -> Result<(), BoxError> {
        if self.processes.count() == 1 || !rank.leads_process() {
            return Ok(());
        }
        let own = model.as_ref().filter(|_| rank.rank == 0);
        let own = own.map(|model| model.clone().into_record().into_bytes()).transpose()?;
        let mut all = self.trained.all_gather(&own)?;
        *self.received.lock() = all.swap_remove(0);
        Ok(())
    }

    /// The trained model, in another process than the first: in host memory.
    pub fn received<M: LearnerModel>(&self, learner: &Learner<M>) -> Result<Option<M>, BoxError> {
        let received = self.received.lock().take();
        let Some(bytes) = received.filter(|_| !self.processes.is_first()) else { return Ok(None) };
        let model = learner.model();
        let own = Ids::of(&model);
        Ok(Some(own.given_to(loaded(model.fork(&host()), ModuleRecord::from_bytes(bytes)?)?)))
    }
}

/// The whole of what the ranks of `group` have, on the first of them.
pub(super) fn gather_to_first<T>(value: T, group: &Group) -> Option<Vec<T>>
where
    T: Clone + Send + Sync + Serialize + DeserializeOwned + 'static,
{
    if group.rank() > 0 {
        group.send_host(value, 0);
        return None;
    }
    Some(std::iter::once(value).chain((1..group.size()).map(|from| group.receive_host(from))).collect())
}
