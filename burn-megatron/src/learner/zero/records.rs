//! Optimizer states as records: taken out of a learner, split by owner, joined again.
//!
//! burn-train keeps a learner's optimizer to itself; a [`LearningCheckpointer`] may read it. Records are burnpack:
//! names begin with the id of their parameter.

use parking_lot::Mutex;
use std::sync::Arc;

use burn::module::ParamId;
use burn::optim::OptimizerRecord;
use burn::store::RecordError;
use burn::tensor::Bytes;
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, LearningCheckpointer};
use burn_pack::{Reader, Writer};

use super::Owners;

/// The states of `learner`'s optimizer, in host memory.
pub(in crate::learner) fn optimizer_record<M: LearnerModel>(
    learner: &Learner<M>,
    store: &EventStoreClient,
) -> OptimizerRecord {
    let states = Arc::new(Mutex::new(None));
    let mut checkpointer = LearningCheckpointer::<M>::new(
        AsyncCheckpointer::new(Capture(Arc::default())),
        AsyncCheckpointer::new(Capture(states.clone())),
        AsyncCheckpointer::new(Capture(Arc::default())),
        Box::new(Always),
    );
    checkpointer.checkpoint(learner, 0, store);
    // Waits for its threads.
    drop(checkpointer);
    states.lock().take().expect("the checkpointer saves always")
}

/// The states that `rank` holds: those of the parameters that it owns, and of those that no rank owns.
pub(in crate::learner) fn split(whole: Bytes, rank: usize, owners: &Owners) -> Result<OptimizerRecord, RecordError> {
    entries([(rank, whole)], |name, rank| owner_of_entry(name, owners).is_none_or(|owner| owner == rank), |id| id)
}

/// The states of all ranks, of records in the order of the ranks. What no rank owns is equal on all.
pub(in crate::learner) fn join(
    ranks: impl IntoIterator<Item = Bytes>,
    owners: &Owners,
) -> Result<OptimizerRecord, RecordError> {
    let parts = ranks.into_iter().enumerate();
    entries(parts, |name, rank| owner_of_entry(name, owners).unwrap_or(0) == rank, |id| id)
}

/// The states of the parameters that `is_taken`, and with `others` what belongs to none.
pub(in crate::learner) fn only(
    whole: Bytes,
    others: bool,
    is_taken: impl Fn(ParamId) -> bool,
) -> Result<Bytes, RecordError> {
    entries([(0, whole)], |name, _| id_of_entry(name).map_or(others, &is_taken), |id| id)?.into_bytes()
}

/// The same states for parameters with other ids.
pub(in crate::learner) fn renamed(whole: Bytes, id_of: impl Fn(ParamId) -> ParamId) -> Result<Bytes, RecordError> {
    entries([(0, whole)], |_, _| true, id_of)?.into_bytes()
}

/// One record of several that have different parameters.
pub(in crate::learner) fn concat(parts: impl IntoIterator<Item = Bytes>) -> Result<OptimizerRecord, RecordError> {
    entries(parts.into_iter().map(|part| (0, part)), |_, _| true, |id| id)
}

/// One record of the entries of `parts` that `is_taken` from the rank each part stands for, under the ids `id_of`.
fn entries(
    parts: impl IntoIterator<Item = (usize, Bytes)>,
    is_taken: impl Fn(&str, usize) -> bool,
    id_of: impl Fn(ParamId) -> ParamId,
) -> Result<OptimizerRecord, RecordError> {
    let name_of = |name: &str| match (id_of_entry(name), name.split_once('.')) {
        (Some(id), Some((_, field))) => format!("{}.{field}", id_of(id).val()),
        (Some(id), None) => id_of(id).val().to_string(),
        (None, _) => name.to_string(),
    };
    let mut tensors = Vec::new();
    let (mut scalars, mut paths) = (Vec::new(), Vec::new());
    for (rank, bytes) in parts {
        let owned = |name: &str| is_taken(name, rank);
        let reader = Reader::from_bytes(bytes)?;
        let entries = reader.scalars().iter().filter(|(name, _)| owned(name));
        scalars.extend(entries.map(|(name, value)| (name_of(name), *value)));
        let entries = reader.metadata().iter().filter(|(name, _)| owned(name));
        paths.extend(entries.map(|(name, path)| (name_of(name), path.clone())));
        tensors.extend(reader.into_tensors()?.into_iter().filter(|tensor| owned(&tensor.name)).map(|mut tensor| {
            tensor.name = name_of(&tensor.name);
            tensor.param_id = tensor.param_id.map(|id| id_of(ParamId::from(id)).val());
            tensor
        }));
    }
    let mut writer = Writer::new(tensors);
    for (name, value) in scalars {
        writer = writer.with_scalar(&name, value);
    }
    for (name, path) in paths {
        writer = writer.with_metadata(&name, &path);
    }
    OptimizerRecord::from_bytes(writer.into_bytes()?)
}

fn owner_of_entry(name: &str, owners: &Owners) -> Option<usize> {
    id_of_entry(name).and_then(|id| owners.owner(id))
}

fn id_of_entry(name: &str) -> Option<ParamId> {
    name.split('.').next().and_then(|id| id.parse::<u64>().ok()).map(ParamId::from)
}

/// Keeps what it is told to save.
struct Capture<R>(Arc<Mutex<Option<R>>>);

impl<R: Checkpoint> Checkpointer<R> for Capture<R> {
    fn save(&self, _epoch: usize, record: R) -> Result<(), CheckpointerError> {
        *self.0.lock() = Some(record);
        Ok(())
    }

    fn delete(&self, _epoch: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, epoch: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown(format!("nothing is stored for epoch {epoch}")))
    }
}

/// Saves whenever asked.
struct Always;

impl CheckpointingStrategy for Always {
    fn checkpointing(&mut self, _epoch: usize, _store: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}
