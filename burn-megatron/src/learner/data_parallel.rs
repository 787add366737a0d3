//! Data parallelism for any Burn module: a rank on each device, and a learner for each rank.

use std::collections::HashSet;
use std::sync::Arc;

use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::mesh_backend::{LogicalOptions, Teams};
use backend_dist::process::Processes;
use burn::optim::OptimizerRecord;
use burn::tensor::Device;
use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearnerModel};
use parking_lot::Mutex;

use super::devices::{has_checkpointing, host, host_of, like};
use super::frozen::has_untrained;
use super::gather_outputs::GatherOutputs;
use super::items::Items;
use super::one_memory::in_one_memory;
use super::processes::Together;
use super::rank_loop::RankSetup;
use super::report::{Failure, Fit, Fitted, Training};
use super::shared::Shared;
use super::shares::{enough, equal_shares, shares_of_first, split};
use super::stages::OnRank;
use super::states::with_own_states;
use super::tensor_parallel::TensorParallel;
use super::zero::records::{optimizer_record, split as split_states};
use super::zero::{Owners, Units, Zero, running_states};

/// Trains clones of the learner on shares of the data and averages their gradients.
pub(super) struct DataParallel<M> {
    /// Data-parallel ranks, of all processes.
    pub ranks: usize,
    /// One per rank of this process, or none: then the ranks have devices like that of the model.
    pub devices: Vec<Device>,
    /// ZeRO stage: 0 to 3.
    pub zero: u8,
    /// Bytes of the buckets in which gradients are reduced during the backward pass, if they are.
    pub overlap: Option<usize>,
    /// What stage 3 gathers together.
    pub units: Units,
    /// Whether parameters of ZeRO 3 stay gathered until the backward pass.
    pub keeps_gathered: bool,
    /// How each data-parallel rank is several ranks.
    pub tensor: Option<TensorParallel<M>>,
    /// In which precision, on logical devices.
    pub computes: LogicalOptions,
    /// Whether batch normalization is over all data-parallel ranks.
    pub sync_batch_norm: bool,
    /// To which gradients are clipped.
    pub max_grad_norm: Option<f64>,
    /// Of random numbers on logical devices.
    pub seed: u64,
    /// How each of them is a pipeline, or runs block by block.
    pub pipeline: Option<Arc<dyn OnRank<M>>>,
}

impl<M: LearnerModel> Fit<M> for DataParallel<M> {
    fn fit(&self, training: Training<M>) -> Fitted<M> {
        let Training { components, learner, train, valid, .. } = &training;
        let together = Together::join(&self.mesh(), components, (train, valid)).and_then(|together| {
            together.check_pipelines(self.pipeline.as_ref().is_some_and(|pipeline| pipeline.crosses_processes()))?;
            enough(train.num_items(), self.ranks)?;
            let devices = together.processes().attempt(|| self.training_devices(learner, together.processes()))?;
            Ok((together, devices))
        });
        match together {
            Ok((together, devices)) => self.fit_together(training, (&together, devices)),
            Err(error) => training.fail(error),
        }
    }
}

impl<M: LearnerModel> DataParallel<M> {
    fn fit_together(&self, training: Training<M>, (together, devices): (&Together, Vec<Device>)) -> Fitted<M> {
        let Training { mut components, mut learner, train, valid, starting_epoch, told } = training;
        // Draws lazily initialised values too, once. With ZeRO 3, or sharded, the model may be too large for a device.
        if self.zero < 3 && !self.is_logical() {
            learner.fork(&devices[0]);
        }
        let (seed, ids) = match together.share(&mut learner, self.seed) {
            Ok(start) => start,
            Err(error) => return Fitted::failed(learner.model().fork(&devices[0]), components, error),
        };
        // The stages of a pipeline have owners of their own.
        let is_checkpointed = devices.iter().any(has_checkpointing);
        let zero = if self.pipeline.is_none() { self.zero(&learner, is_checkpointed) } else { None };
        let resumed = (starting_epoch > 1).then_some(&*components.event_store);
        let learners = match self.learner_of_each_rank(&mut learner, &zero, resumed) {
            Ok(learners) => learners,
            Err(message) => return Fitted::failed(learner.model().fork(&devices[0]), components, message),
        };
        // A checkpoint writes its states into those that all learners share, and a training that fails returns its start.
        let has_states = (self.ranks > 1 || self.pipeline.is_some()) && !running_states(&learner.model()).is_empty();
        let start = has_states.then(|| with_own_states(&learner.model()));
        let train = split(&train, equal_shares(train.num_items(), self.ranks));
        let mesh = self.mesh();
        // Outputs of a validation do not leave their process, and all of the set is to be in the metrics.
        let ParallelLayout { tp, pp, .. } = *mesh.layout();
        let reporting = (mesh.world_size() / together.processes().count()).div_ceil(tp * pp);
        // A forward pass is a collective, so a rank without a batch takes the first item and nobody looks at the result.
        let has_filler = self.zero == 3 && valid.num_items() > 0;
        let fillers: Vec<_> = (0..self.ranks).map(|_| has_filler.then(|| valid.slice(0, 1))).collect();
        let valid = split(&valid, shares_of_first(valid.num_items(), reporting, self.ranks));
        let apart = self.is_logical() || devices.iter().any(|device| *device != devices[0]);
        let gather = if told.is_none() { GatherOutputs::between(together.processes().count()) } else { None };
        let processor = in_one_memory::<M>(components.event_processor, gather.is_some() || reporting > 1 && apart);

        let shared = Shared {
            epochs: starting_epoch..=components.num_epochs,
            accumulation: components.grad_accumulation.unwrap_or(1),
            interrupter: components.interrupter,
            store: components.event_store,
            processor: Mutex::new(processor),
            trained: Items::new(self.ranks),
            validated: Items::new(self.ranks),
            reports: together.processes().is_first(),
            reporting,
            gather,
            checkpoints: components.checkpointer.is_some(),
            seed,
            ids: ids.clone(),
            max_grad_norm: self.max_grad_norm,
            told,
            waits_in_operations: self.sync_batch_norm
                || self.is_logical() && (self.overlap.is_some() || self.zero == 3),
        };
        let mut setups: Vec<Option<RankSetup<M>>> = Vec::new();
        let loaders = train.into_iter().zip(valid).zip(fillers);
        for (rank, (learner, ((train, valid), filler))) in learners.into_iter().zip(loaders).enumerate() {
            setups.push(Some(RankSetup {
                learner,
                zero: zero.clone(),
                train,
                valid,
                filler,
                // Rank 0's learner stands for all: they are equal after every step.
                checkpointer: if rank == 0 { components.checkpointer.take() } else { None },
                early_stopping: if rank == 0 { components.early_stopping.take() } else { None },
            }));
        }
        let setups = Mutex::new(setups);
        let (start_of_stages, store) = (Mutex::new(learner.clone()), shared.store.clone());
        let teams = self.teams(&mesh);
        let launched: Vec<Device> = match &teams {
            Some(_) => devices.iter().map(|device| device.clone().inner()).collect(),
            None => devices.clone(),
        };
        let like_user = |at: Device| if is_checkpointed { at.autodiff().gradient_checkpointing() } else { at };
        // Their devices live until nobody reads what they have computed.
        let ranks = Mutex::new(Vec::new());
        let result = together.processes().launch(&launched, |rank| {
            ranks.lock().push(rank.clone());
            let run = |device: &Device| {
                let of_stages = || (start_of_stages.lock().clone(), ids.clone());
                if let Some(pipeline) = self.pipeline.as_ref().filter(|_| rank.coords.pp > 0) {
                    return pipeline.follow(of_stages(), device, &rank, &store);
                }
                let setup = setups.lock()[rank.coords.dp].take();
                let setup = setup.expect("every data-parallel rank starts once");
                if let Some(pipeline) = &self.pipeline {
                    // Batches go from the host to every stage.
                    let lead = pipeline.lead(of_stages(), device, &rank)?;
                    return setup.run_as(lead, &host_of(device), &rank.group(Axis::Dp), &shared);
                }
                let placing = self.tensor.as_ref().map(|tensor| tensor.on(&rank));
                setup.run(device, &rank.group(Axis::Dp), placing.as_ref(), &shared)
            };
            let model = match &teams {
                Some(teams) => teams.run(&rank, |device| run(&self.training_device(like_user(device))))?,
                None => Some(run(&devices[rank.rank - together.processes().ranks().start])?),
            };
            together.end(&rank, &model)?;
            Ok(model)
        });
        if result.is_ok() {
            shared.flush();
        }
        let processor = shared.processor.into_inner();
        drop(ranks);
        let trained = result.map_err(Failure::from).and_then(|models| match together.received(&learner) {
            Ok(Some(model)) => Ok(model),
            Ok(None) => Ok(models.into_iter().next().flatten().expect("rank 0 leads")),
            Err(error) => Err(Failure { rank: together.processes().ranks().start, message: error.to_string() }),
        });
        match trained {
            Ok(model) => Fitted { model, processor, failure: None },
            Err(failure) => {
                let model = start.unwrap_or_else(|| learner.model()).fork(&devices[0]);
                Fitted { model, processor, failure: Some(failure) }
            }
        }
    }
}

impl<M> DataParallel<M> {
    /// On devices like that of the model.
    pub(super) fn new(ranks: usize, zero: u8, units: Units) -> Self {
        Self {
            ranks,
            devices: Vec::new(),
            zero,
            overlap: None,
            units,
            keeps_gathered: false,
            tensor: None,
            computes: LogicalOptions::default(),
            sync_batch_norm: false,
            max_grad_norm: None,
            seed: 0,
            pipeline: None,
        }
    }

    /// Whether a data-parallel rank computes on logical devices.
    fn is_logical(&self) -> bool {
        self.tensor.is_some() || self.pipeline.is_some()
    }

    /// The ranks of each data-parallel rank, if they are several.
    pub(super) fn teams(&self, mesh: &Mesh) -> Option<Teams> {
        let sequence = self.tensor.as_ref().is_some_and(|tensor| tensor.sequence);
        let teams = || Teams::new(mesh, Axis::Tp).across(Axis::Dp).sequence_parallel(sequence).options(self.computes);
        self.is_logical().then(|| teams().sync_batch_norm(self.sync_batch_norm))
    }

    /// `device` with what this training asks of autodiff.
    pub(super) fn training_device(&self, device: Device) -> Device {
        let device = if device.is_autodiff() { device } else { device.autodiff() };
        // Else operations that keep a view of a gathered weight keep the weight.
        let frees_gathered = self.zero == 3 && !self.keeps_gathered;
        if frees_gathered { device.gradient_checkpointing() } else { device }
    }
}

impl<M: LearnerModel> DataParallel<M> {
    /// How ranks step models of their own; `None` if the learners hold the models.
    pub(super) fn zero(&self, learner: &Learner<M>, is_checkpointed: bool) -> Option<Zero> {
        let model = learner.model();
        // Of several ranks, or of one whose model is not where the learner's is, with which clones share them.
        let has_own = self.ranks > 1 || self.tensor.is_some();
        let states = if has_own { running_states(&model) } else { HashSet::new() };
        // What one rank has whole the step of the optimizer may change as it likes.
        let is_whole = |tensor: &TensorParallel<M>| tensor.ranks == 1 && !is_checkpointed && has_untrained(&model);
        let learners_have_it = self.overlap.is_none() && self.tensor.as_ref().is_none_or(is_whole);
        let owners = match self.zero {
            0 if states.is_empty() && learners_have_it => return None,
            0 => Owners::of(&model, 1),
            3 => Owners::of_units(&model, self.ranks, &self.units),
            _ => Owners::of(&model, self.ranks),
        };
        let (stage, overlap, units) = (self.zero, self.overlap, self.units.clone());
        Some(Zero { stage, owners: owners.into(), overlap, units, states: states.into() })
    }

    /// A learner for every rank. With ZeRO, whoever has `resumed` from a checkpoint gets the states that it owns.
    pub(super) fn learner_of_each_rank(
        &self,
        learner: &mut Learner<M>,
        zero: &Option<Zero>,
        resumed: Option<&EventStoreClient>,
    ) -> Result<Vec<Learner<M>>, String> {
        if zero.is_some() || self.is_logical() {
            // Before the clones, so that all ranks share one copy of the values that they do not step.
            learner.fork(&host());
        }
        let mut learners = vec![learner.clone(); self.ranks];
        let Some(zero) = zero else { return Ok(learners) };
        if let (Some(store), true) = (resumed, zero.stage > 0) {
            let states = optimizer_record(learner, store).into_bytes().map_err(|error| error.to_string())?;
            for (rank, learner) in learners.iter_mut().enumerate() {
                let own = split_states(states.clone(), rank, &zero.owners).map_err(|error| error.to_string())?;
                learner.load_optim(own);
            }
            learner.load_optim(OptimizerRecord::default());
        }
        Ok(learners)
    }

    /// The ranks. Those of a pipeline are next to each other, so that processes have whole pipelines.
    fn mesh(&self) -> Mesh {
        let tp = self.tensor.as_ref().map_or(1, |tensor| tensor.ranks);
        let pp = self.pipeline.as_ref().map_or(1, |pipeline| pipeline.ranks());
        let layout = ParallelLayout { tp, pp, dp: self.ranks, ..Default::default() };
        Mesh::new(layout).expect("a layout with tensor, pipeline and data parallelism is legal").with_tp_pp_dp_mapping()
    }

    /// The device of every rank of this process, with autodiff.
    fn training_devices(&self, learner: &Learner<M>, processes: &Processes) -> Result<Vec<Device>, String> {
        let devices = match self.devices.as_slice() {
            [] => like(learner.model().devices().first().cloned().unwrap_or_default(), processes.local_devices())?,
            devices => devices.to_vec(),
        };
        Ok(devices.into_iter().map(|device| self.training_device(device)).collect())
    }
}
