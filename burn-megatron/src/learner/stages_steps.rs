//! A few optimizer steps of a model of stages over the ranks of a pipeline, as [`ModuleSteps`](super::ModuleSteps) for
//! other layouts.

use std::ops::Range;
use std::sync::Arc;

use backend_dist::gradients::overlapped::BUCKET;
use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::mesh_backend::Teams;
use backend_dist::parallelize::{Plan, check};
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleDisplay};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Tensor};
use burn::train::{InferenceStep, Learner, TrainOutput, TrainStep};

use super::devices::host;
use super::module_steps::{Loss, ModuleTrace, Notebook, named, number};
use super::stages::{Division, Part, StageRank, Stages, Wanted};
use super::states::with_own_states;
use super::zero::Units;
use crate::schedule::ScheduleKind;
use models::Recompute;
use parking_lot::Mutex;

/// Makes the batch of some items, which are numbered over all steps.
pub(crate) type BatchOf<M> = Arc<dyn Fn(Range<usize>, &Device) -> <M as TrainStep>::Input + Send + Sync>;

/// What to run.
pub(crate) struct StagesSteps<M: Stages> {
    pub batch: BatchOf<M>,
    /// Optimizer steps.
    pub steps: usize,
    /// Items of a step, over all ranks: a multiple of the data-parallel ranks times the micro-batches.
    pub items: usize,
    pub optimizer: fn() -> ModuleOptimizer,
    pub micro_batches: usize,
    pub schedule: Option<ScheduleKind>,
    pub recompute: Recompute,
    /// Whether ZeRO 0 to 2 reduces gradients during the backward passes.
    pub overlap: bool,
}

impl<M: Stages + ModuleDisplay + 'static> StagesSteps<M> {
    /// On the ranks of `layout`, rank `r` on `devices[r % devices.len()]`. The traces are those of data-parallel ranks, each
    /// of all stages. The error says why a rank failed; a model, a plan or a schedule that does not fit.
    pub fn over_ranks(
        &self,
        module: &M,
        layout: &ParallelLayout,
        plan: &Plan,
        devices: &[Device],
    ) -> Result<Vec<ModuleTrace>, String> {
        let (schedule, recompute) = (self.schedule, self.recompute.clone());
        let wanted = Wanted { schedule, micro_batches: Some(self.micro_batches), recompute };
        // Errors have the paths of the module itself.
        Division::of(module, layout, &wanted).map_err(|error| error.to_string())?;
        let notes = Notes { notebook: Notebook::default(), share: 1.0 / self.micro_batches as f64 };
        let probe = Probe { module: with_own_states(module).fork(&host()), notes };
        let division = Arc::new(Division::of(&probe, layout, &wanted).map_err(|error| error.to_string())?);
        let plan = &plan.clone().within("module");
        if layout.tp > 1 {
            check(&probe, plan, layout.tp, layout.sequence_parallel()).map_err(|error| error.to_string())?;
        }
        let mesh = Mesh::new(layout.clone()).map_err(|error| error.to_string())?;
        // Small modules are sharded too, or nothing would be tested.
        let units = Units::auto().keep_below(2);
        let teams = Teams::new(&mesh, Axis::Tp).across(Axis::Dp).sequence_parallel(layout.sequence_parallel());
        let learner = Mutex::new(Learner::new(probe, (self.optimizer)(), 1e-2));
        let train = |rank: &Rank, device: &Device| {
            let learner = learner.lock().clone();
            let mut stages = StageRank::new(learner, device, (rank, plan), (layout.zero, &units), division.clone())?;
            stages = stages.overlapping((self.overlap && layout.zero < 3).then_some(BUCKET));
            let mut losses = Vec::new();
            for step in 0..self.steps {
                let batch = |items| (self.batch)(items, device);
                let found = stages.train(self.items_of(step, rank.coords.dp, layout.dp).map(batch).collect());
                losses.extend((!found.is_empty()).then(|| found.iter().map(|loss| loss.0).sum::<f64>()));
                stages.step();
            }
            stages.average_states();
            let parameters = named(&stages.model().module, None, |id| stages.has_value(id));
            let gradients = stages.learner().model().notes.notebook.take();
            Ok((rank.coords.dp, ModuleTrace { losses, gradients, parameters }))
        };
        // As a training has it.
        let checkpointed = |device: Device| if layout.zero == 3 { device.gradient_checkpointing() } else { device };
        let train = |rank: &Rank, logical: Device| train(rank, &checkpointed(logical.autodiff()));
        let traces = launch(&mesh, devices, |rank| teams.run(&rank, |logical| train(&rank, logical)));
        let mut ranks = vec![ModuleTrace::default(); layout.dp];
        for (dp, trace) in traces.map_err(|error| error.to_string())?.into_iter().flatten() {
            let rank = &mut ranks[dp];
            rank.losses.extend(trace.losses.iter().map(|sum| sum / self.micro_batches as f64));
            rank.gradients.resize(self.steps, Default::default());
            rank.gradients.iter_mut().zip(trace.gradients).for_each(|(all, step)| all.extend(step));
            rank.parameters.extend(trace.parameters);
        }
        Ok(ranks)
    }

    /// The items of each micro-batch.
    fn items_of(&self, step: usize, rank: usize, ranks: usize) -> impl Iterator<Item = Range<usize>> {
        let size = self.items / ranks / self.micro_batches;
        let start = step * self.items + rank * size * self.micro_batches;
        (0..self.micro_batches).map(move |index| start + index * size..start + (index + 1) * size)
    }
}

/// The module as burn-train wants it: notes the gradients that its optimizer gets.
#[derive(Module, Debug)]
struct Probe<M> {
    module: M,
    #[module(skip)]
    notes: Notes,
}

#[derive(Clone, Debug)]
struct Notes {
    notebook: Notebook,
    /// Of a micro-batch in the loss of a step.
    share: f64,
}

impl<M: Stages + ModuleDisplay> TrainStep for Probe<M> {
    type Input = <M as TrainStep>::Input;
    type Output = Loss;

    fn step(&self, batch: Self::Input) -> TrainOutput<Loss> {
        let (loss, output) = self.run(&batch);
        TrainOutput::new(self, loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, grads: GradientsParams) -> Self {
        self.notes.notebook.note(named(&self.module, Some(&grads), |_| true));
        optimizer.step(rate, self, grads)
    }
}

impl<M: Stages + ModuleDisplay> InferenceStep for Probe<M> {
    type Input = <M as TrainStep>::Input;
    type Output = Loss;

    fn step(&self, batch: Self::Input) -> Loss {
        self.run(&batch).1
    }
}

impl<M: Stages + ModuleDisplay> Stages for Probe<M> {
    type Activation = M::Activation;

    fn blocks(&self) -> usize {
        self.module.blocks()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        self.module.owner(path.strip_prefix("module.").unwrap_or(path))
    }

    fn first(&self, batch: &Self::Input) -> M::Activation {
        self.module.first(batch)
    }

    fn block(&self, index: usize, x: M::Activation, batch: &Self::Input) -> M::Activation {
        self.module.block(index, x, batch)
    }

    fn last(&self, x: M::Activation, batch: &Self::Input) -> (Tensor<1>, Loss) {
        let (loss, _) = self.module.last(x, batch);
        let value = number(&loss);
        (loss * self.notes.share, Loss(value))
    }
}
