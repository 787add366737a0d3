//! Data parallelism for any Burn module: sets up a rank per device and runs a [`RankLoop`] on each.

use std::sync::Mutex;

use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::data::dataloader::DataLoader;
use burn::tensor::Device;
use burn::train::{Learner, LearnerModel, TrainLoader, TrainingComponents, ValidLoader};
use std::sync::Arc;

use super::items::Items;
use super::outcome::{Fit, Fitted};
use super::rank_loop::{RankLoop, Shared};
use super::shares::{equal_shares, whole_shares};

/// Trains clones of the learner on shares of the data and averages their gradients.
pub(super) struct DataParallel {
    pub ranks: usize,
    /// One per rank, or none: then all ranks share the device of the model.
    pub devices: Vec<Device>,
}

impl<M: LearnerModel> Fit<M> for DataParallel {
    fn fit(
        &self,
        mut components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Fitted<M> {
        let devices = self.training_devices(&learner);
        // Moving the parameters also draws the values of lazily initialised ones, once, before the model is cloned.
        learner.fork(&devices[0]);
        let train = split(&train, equal_shares(train.num_items(), self.ranks), &devices);
        let inference: Vec<Device> = devices.iter().map(|device| device.clone().inner()).collect();
        let valid = split(&valid, whole_shares(valid.num_items(), self.ranks), &inference);

        let shared = Shared {
            epochs: starting_epoch..=components.num_epochs,
            accumulation: components.grad_accumulation.unwrap_or(1),
            interrupter: components.interrupter,
            store: components.event_store,
            processor: Mutex::new(components.event_processor),
            trained: Items::new(self.ranks),
            validated: Items::new(self.ranks),
        };
        let mut seats: Vec<Option<RankLoop<M>>> = Vec::new();
        for (rank, (train, valid)) in train.into_iter().zip(valid).enumerate() {
            seats.push(Some(RankLoop {
                learner: learner.clone(),
                device: devices[rank].clone(),
                train,
                valid,
                // Rank 0's learner stands for all: they are equal after every step.
                checkpointer: if rank == 0 { components.checkpointer.take() } else { None },
                early_stopping: if rank == 0 { components.early_stopping.take() } else { None },
            }));
        }
        let seats = Mutex::new(seats);
        let layout = ParallelLayout { dp: self.ranks, ..Default::default() };
        let mesh = Mesh::new(layout).expect("a layout with data parallelism alone is legal");
        let result = launch(&mesh, &devices, |rank| {
            let seat = seats.lock().unwrap_or_else(|poisoned| poisoned.into_inner())[rank.rank].take();
            let seat = seat.expect("every rank starts once");
            seat.run(&rank.group(Axis::Dp), &shared)
        });
        let processor = shared.processor.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        match result {
            Ok(mut models) => Fitted { model: models.swap_remove(0), processor, failure: None },
            Err(failure) => Fitted { model: learner.model(), processor, failure: Some(failure.into()) },
        }
    }
}

impl DataParallel {
    /// The device of every rank, with autodiff.
    fn training_devices<M: LearnerModel>(&self, learner: &Learner<M>) -> Vec<Device> {
        let devices = match self.devices.as_slice() {
            [] => vec![learner.model().devices().first().cloned().unwrap_or_default(); self.ranks],
            devices => devices.to_vec(),
        };
        devices.into_iter().map(|device| if device.is_autodiff() { device } else { device.autodiff() }).collect()
    }
}

fn split<I>(
    loader: &Arc<dyn DataLoader<I>>,
    shares: Vec<std::ops::Range<usize>>,
    devices: &[Device],
) -> Vec<Arc<dyn DataLoader<I>>> {
    shares
        .into_iter()
        .zip(devices)
        .map(|(share, device)| loader.slice(share.start, share.end).to_device(device))
        .collect()
}
