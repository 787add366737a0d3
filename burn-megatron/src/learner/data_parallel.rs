//! Data parallelism for any Burn module: sets up a rank per device and seats a learner on each.

use std::sync::Mutex;

use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::data::dataloader::DataLoader;
use burn::optim::OptimizerRecord;
use burn::tensor::Device;
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel, TrainLoader, TrainingComponents, ValidLoader};
use std::sync::Arc;

use super::items::Items;
use super::outcome::{Failure, Fit, Fitted};
use super::rank_loop::{Seat, Shared};
use super::replica::host;
use super::shares::{equal_shares, whole_shares};
use super::zero::records::{of_owners, optimizer_record};
use super::zero::{Owners, Zero};

/// Trains clones of the learner on shares of the data and averages their gradients.
pub(super) struct DataParallel {
    pub ranks: usize,
    /// One per rank, or none: then all ranks share the device of the model.
    pub devices: Vec<Device>,
    /// ZeRO stage: 0, 1 or 2.
    pub zero: u8,
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
        let zero = self.zero(&learner);
        let learners = match self.seat_learners(&mut learner, &zero, starting_epoch, &components.event_store) {
            Ok(learners) => learners,
            Err(message) => {
                learner.fork(&devices[0]);
                let failure = Some(Failure { rank: 0, message });
                return Fitted { model: learner.model(), processor: components.event_processor, failure };
            }
        };
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
            checkpoints: components.checkpointer.is_some(),
            states: Items::new(self.ranks),
        };
        let mut seats: Vec<Option<Seat<M>>> = Vec::new();
        for (rank, ((learner, train), valid)) in learners.into_iter().zip(train).zip(valid).enumerate() {
            seats.push(Some(Seat {
                learner,
                device: devices[rank].clone(),
                zero: zero.clone(),
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
            Err(failure) => {
                learner.fork(&devices[0]);
                Fitted { model: learner.model(), processor, failure: Some(failure.into()) }
            }
        }
    }
}

impl DataParallel {
    pub(super) fn zero<M: LearnerModel>(&self, learner: &Learner<M>) -> Option<Zero> {
        (self.zero > 0).then(|| Zero { stage: self.zero, owners: Owners::of(&learner.model(), self.ranks).into() })
    }

    /// A learner for every rank. With ZeRO, whoever goes on from a checkpoint gets the states that it owns.
    pub(super) fn seat_learners<M: LearnerModel>(
        &self,
        learner: &mut Learner<M>,
        zero: &Option<Zero>,
        starting_epoch: usize,
        store: &EventStoreClient,
    ) -> Result<Vec<Learner<M>>, String> {
        let Some(zero) = zero else { return Ok(vec![learner.clone(); self.ranks]) };
        // Before the clones, so that all ranks share one copy of the values that they do not step.
        learner.fork(&host());
        let mut learners = vec![learner.clone(); self.ranks];
        if starting_epoch > 1 {
            let states = optimizer_record(learner, store).into_bytes().map_err(|error| error.to_string())?;
            for (rank, learner) in learners.iter_mut().enumerate() {
                let own = of_owners([(rank, states.clone())], &zero.owners).map_err(|error| error.to_string())?;
                learner.load_optim(own);
            }
            learner.load_optim(OptimizerRecord::default());
        }
        Ok(learners)
    }

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
