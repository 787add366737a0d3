//! A few optimizer steps of any module, with stock Burn on one device and over data-parallel ranks, and all numbers
//! that can be compared.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use backend_dist::fully_shard::Units;
use backend_dist::gpu;
use backend_dist::gradients::overlapped::BUCKET;
use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::parallelize::Plan;
use backend_dist::paths::PathVisitor;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleDisplay, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, ExecutionError, Tensor};
use burn::train::metric::ItemLazy;
use burn::train::{InferenceStep, Learner, TrainOutput, TrainStep};
use parking_lot::Mutex;

use super::data_parallel::DataParallel;
use super::devices::host;
use super::dp_rank::DpRank;
use super::report::advised;
use super::states::with_own_states;
use super::tensor_parallel::TensorParallel;

/// Values by the path of their parameter.
pub(crate) type Named = BTreeMap<String, Vec<f64>>;

/// The mean loss of some items, which are numbered over all steps.
pub(crate) type LossOf<M> = Arc<dyn Fn(&M, Range<usize>, &Device) -> Tensor<1> + Send + Sync>;

/// What a rank computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModuleTrace {
    /// Of every step.
    pub losses: Vec<f64>,
    /// That the rank's optimizer got, of every step.
    pub gradients: Vec<Named>,
    /// After the last step, with frozen ones and running states; with ZeRO 3 on rank 0 only.
    pub parameters: Named,
}

/// What to run.
pub(crate) struct ModuleSteps<M> {
    /// The loss of items.
    pub loss: LossOf<M>,
    /// Optimizer steps.
    pub steps: usize,
    /// Items of a step, over all ranks.
    pub items: usize,
    /// Makes the optimizer.
    pub optimizer: fn() -> ModuleOptimizer,
    /// Whether ZeRO 0 to 2 reduces gradients during the backward pass.
    pub overlap: bool,
}

impl<M: Module + ModuleDisplay + 'static> ModuleSteps<M> {
    /// On one CPU device, by nothing but Burn.
    pub fn one_device(&self, module: &M) -> ModuleTrace {
        let mut learner = self.learner(module);
        learner.fork(&host());
        let mut losses = Vec::new();
        for step in 0..self.steps {
            let output = learner.train_step((self.items_of(step, 0, 1), host()));
            losses.push(output.item.0);
            learner.lr_step();
            learner.optimizer_step(output.grads);
        }
        learner.model().trace(losses)
    }

    /// On the ranks of `layout`, which has tensor, sequence and data parallelism with ZeRO 0 to 3; rank `r` is on
    /// `devices[r % devices.len()]`. `items` is a multiple of the data-parallel ranks. The traces are those of data-parallel
    /// ranks. The error says why a rank failed; a plan that does not fit.
    pub fn over_ranks(
        &self,
        module: &M,
        layout: &ParallelLayout,
        plan: &Plan,
        devices: &[Device],
    ) -> Result<Vec<ModuleTrace>, String> {
        // Small modules are sharded too, or nothing would be tested.
        let units = Units::auto().keep_below(2);
        let is_gpu = devices.iter().any(|device| gpu::index(device).is_some());
        // The module is a field of `Probe`.
        let (ranks, plan) = (layout.dp, plan.clone().within("module"));
        let tensor = TensorParallel::new(layout, &plan, is_gpu);
        let overlap = self.overlap.then_some(BUCKET);
        let strategy = DataParallel { tensor, overlap, ..DataParallel::new(ranks, layout.zero, units) };
        let device = strategy.training_device(host());
        let mut learner = self.learner(module);
        learner.fork(&device);
        if let Some(tensor) = &strategy.tensor {
            tensor.check(&learner.model()).map_err(|error| error.to_string())?;
        }
        let zero = strategy.zero(&learner, false);
        let learners = Mutex::new(strategy.learner_of_each_rank(&mut learner, &zero, None)?);
        let mesh = Mesh::new(layout.clone()).map_err(|error| error.to_string())?;
        let teams = strategy.teams(&mesh);
        let train = |rank: &Rank, device: &Device| {
            let dp = rank.group(Axis::Dp);
            let learner = learners.lock()[dp.rank()].clone();
            let placing = strategy.tensor.as_ref().map(|tensor| tensor.on(rank));
            let mut dp_rank = DpRank::new(learner, device, zero.clone(), &dp, placing.as_ref())?;
            let mut losses = Vec::new();
            for step in 0..self.steps {
                let output = dp_rank.train_step((self.items_of(step, dp.rank(), ranks), device.clone()), true);
                losses.push(output.item.0);
                dp_rank.accumulate(output.grads);
                dp_rank.step();
            }
            dp_rank.average_states();
            let is_whole = dp.rank() == 0 || !dp_rank.is_fully_sharded();
            let trace = dp_rank.into_model()?.trace(losses);
            Ok(if is_whole { trace } else { ModuleTrace { parameters: Named::new(), ..trace } })
        };
        let traces = launch(&mesh, devices, |rank| match &teams {
            Some(teams) => teams.run(&rank, |logical| train(&rank, &strategy.training_device(logical))),
            None => train(&rank, &device).map(Some),
        });
        Ok(traces.map_err(|error| advised(&error))?.into_iter().flatten().collect())
    }

    fn items_of(&self, step: usize, rank: usize, ranks: usize) -> Range<usize> {
        let (start, share) = (step * self.items, self.items / ranks);
        start + rank * share..start + (rank + 1) * share
    }

    /// A learner of the module with states and a notebook of its own.
    fn learner(&self, module: &M) -> Learner<Probe<M>> {
        let notes = Notes { loss: self.loss.clone(), notebook: Notebook::default() };
        let probe = Probe { module: with_own_states(module), notes };
        Learner::new(probe, (self.optimizer)(), 1e-2)
    }
}

/// The module as burn-train wants it: notes the gradients that its optimizer gets.
#[derive(Module, Debug)]
struct Probe<M> {
    module: M,
    #[module(skip)]
    notes: Notes<M>,
}

struct Notes<M> {
    loss: LossOf<M>,
    notebook: Notebook,
}

/// The gradients of each step, of the rank on each thread. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Notebook(Arc<Mutex<HashMap<ThreadId, Vec<Named>>>>);

impl Notebook {
    /// Notes the gradients of a step of this thread's rank.
    pub fn note(&self, gradients: Named) {
        let mut notes = self.0.lock();
        notes.entry(thread::current().id()).or_default().push(gradients);
    }

    /// Those of this thread's rank.
    pub fn take(&self) -> Vec<Named> {
        self.0.lock().remove(&thread::current().id()).unwrap_or_default()
    }
}

impl<M> Clone for Notes<M> {
    fn clone(&self) -> Self {
        Self { loss: self.loss.clone(), notebook: self.notebook.clone() }
    }
}

impl<M> fmt::Debug for Notes<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notes")
    }
}

impl<M: Module + ModuleDisplay> Probe<M> {
    fn trace(&self, losses: Vec<f64>) -> ModuleTrace {
        // A running state holds back its last update until a validation copy has it applied.
        drop(self.module.valid());
        ModuleTrace { losses, gradients: self.notes.notebook.take(), parameters: named(&self.module, None, |_| true) }
    }
}

/// A loss.
pub(super) struct Loss(pub f64);

impl ItemLazy for Loss {
    fn sync(self) -> Result<Self, ExecutionError> {
        Ok(self)
    }
}

impl<M: Module + ModuleDisplay> TrainStep for Probe<M> {
    type Input = (Range<usize>, Device);
    type Output = Loss;

    fn step(&self, (items, device): Self::Input) -> TrainOutput<Loss> {
        let loss = (self.notes.loss)(&self.module, items, &device);
        let value = number(&loss);
        TrainOutput::new(self, loss.backward(), Loss(value))
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, grads: GradientsParams) -> Self {
        self.notes.notebook.note(named(&self.module, Some(&grads), |_| true));
        optimizer.step(rate, self, grads)
    }
}

impl<M: Module + ModuleDisplay> InferenceStep for Probe<M> {
    type Input = (Range<usize>, Device);
    type Output = Loss;

    fn step(&self, input: Self::Input) -> Loss {
        TrainStep::step(self, input).item
    }
}

/// The value of a loss.
pub(super) fn number(loss: &Tensor<1>) -> f64 {
    let values: Vec<f64> = loss.to_data().iter::<f64>().collect();
    let [value] = values[..] else { panic!("a loss is one number, the mean over the items, not {}", values.len()) };
    value
}

/// Of the parameters `of` of `module` the gradients, or the values.
pub(super) fn named<M: Module>(module: &M, grads: Option<&GradientsParams>, of: impl Fn(ParamId) -> bool) -> Named {
    Collect { of: &of, grads, found: Named::new() }.walk(module).found
}

struct Collect<'a> {
    of: &'a dyn Fn(ParamId) -> bool,
    grads: Option<&'a GradientsParams>,
    found: Named,
}

impl PathVisitor for Collect<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let tensor = if let Some(grads) = self.grads { grads.get::<D>(param.id) } else { Some(param.val()) };
        if let Some(tensor) = tensor.filter(|_| (self.of)(param.id)) {
            self.found.insert(path.to_string(), tensor.into_data().iter::<f64>().collect());
        }
    }
}
