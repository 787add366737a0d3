//! How a run starts, and starts again: its folder of checkpoints, and where it resumes.

use std::sync::Arc;

use backend_dist::launch::BoxError;
use backend_dist::process::Processes;
use burn::train::Interrupter;
use models::CausalLm;

use super::fit::ModelParallel;
use super::local_copies;
use super::logs::Tracing;
use super::same_data::check_data;
use super::saving::{Newest, Saves};
use super::shared::Start;
use super::worker::StopChannel;
use crate::checkpoint::Checkpoint;

impl<M: CausalLm, R> ModelParallel<M, R> {
    /// Takes the folder of checkpoints and looks at the one to resume from. `epoch` is burn-train's
    /// `SupervisedTraining::checkpoint`; `again` is where a run begins again that has begun before, and its newest checkpoint.
    pub(super) fn start(
        &self,
        processes: &Processes,
        epoch: Option<usize>,
        interrupter: &Interrupter,
        again: Option<(Option<Arc<Checkpoint>>, Option<Newest>)>,
    ) -> Result<Start, BoxError> {
        let resumed = self.resumed.as_ref().map_err(Clone::clone)?;
        let epoch_of = |checkpoint: &Arc<Checkpoint>| checkpoint.state().step as usize / self.settings.epoch;
        let is_new = again.is_none();
        let (again, newest) = again.map_or((None, None), |(from, newest)| (Some(from), newest));
        let from = match (again, epoch, &self.settings.checkpoints) {
            (Some(from), ..) => from,
            (None, Some(epoch), Some(options)) if resumed.as_ref().is_none_or(|resumed| epoch_of(resumed) != epoch) => {
                Some(Arc::new(Checkpoint::of_step(&options.root, (epoch * self.settings.epoch) as u64)?))
            }
            _ => resumed.clone(),
        };
        if let Some(checkpoint) = from.as_ref().filter(|_| is_new && !self.settings.other_data) {
            check_data(checkpoint, &*self.settings.data.train)?;
        }
        let local = self.settings.local_copies.as_ref();
        let copy = local_copies::is_copy(from.as_deref(), local);
        let on_disk = || local_copies::on_disk(from.as_deref(), copy, self.settings.checkpoints.as_ref());
        let newest = newest.or_else(|| is_new.then(on_disk).flatten());
        let state = from.as_ref().map(|checkpoint| checkpoint.state());
        let (step, consumed) = state.map_or((0, 0), |state| (state.step, state.consumed_samples));
        self.train.resume_at(step as usize, consumed as usize);
        self.copies.iter().for_each(|copies| copies.begin(processes.ranks().len()));
        let mut description = self.settings.description.clone();
        // After a device was lost it is another one than the configuration says.
        if let Some(layout) = description.config.get_mut("parallel") {
            *layout = serde_json::to_value(processes.mesh().layout())?;
        }
        let data = &*self.settings.data.train;
        let local = local.map(|options| {
            if is_new && !copy && processes.is_first() {
                local_copies::delete(&options.root)?;
            }
            Saves::new("local copies", options, processes, description.clone(), data)
        });
        let local = local.transpose()?;
        let saves = self.settings.checkpoints.as_ref();
        let saves = saves.map(|options| Saves::new("saves", options, processes, description, data)).transpose()?;
        saves.iter().for_each(|saves| saves.begin_from(newest.as_ref()));
        if let (Some(records), Some(saves)) = (&self.records, &saves) {
            records.attach(saves);
        }
        let trace = self.settings.logs.trace.as_ref().filter(|_| is_new);
        let tracing = trace.map(|file| Tracing::new(file, step, self.settings.steps as u64)).transpose()?;
        if let Some(tracing) = tracing.as_ref().filter(|_| processes.is_first()) {
            tracing.write(&[])?;
        }
        let channel = || processes.channel("requests to stop");
        let stop_channel =
            (processes.count() > 1).then(|| StopChannel { interrupter: interrupter.clone(), channel: channel() });
        let (from, ranks) = (from.into(), processes.ranks().len());
        Ok(Start { saves, local, from, newest, restarts: 0, tracing, stop_channel, ranks })
    }
}
