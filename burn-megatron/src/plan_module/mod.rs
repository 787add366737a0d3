//! What a training step of any Burn module needs of a rank, before it starts: its program runs on a
//! [device without data](backend_dist::mesh_backend::MetaDevice).

mod families;
mod owned;
mod report;

use backend_dist::launch::{BoxError, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::mesh_backend::{Counts, MetaDevice};
use backend_dist::parallelize::{Plan, check, parallelize};
use burn::module::{Module, ModuleDisplay, ModuleVisitor, Param};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Bool, Device, Int, Tensor};

use crate::learner::for_any_module;
pub use families::{Subject, plan_config, plan_folder};
use owned::{again, of_fullest};

/// How a module is trained.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let run = ModuleRun { layout: "TP2 SP DP4 ZeRO1".parse()?, micro_batches: 4, ..ModuleRun::default() };
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModuleRun {
    /// Tensor, sequence and data parallelism, and ZeRO 0 to 2.
    pub layout: ParallelLayout,
    /// Which parameters tensor parallelism shards.
    pub plan: Plan,
    /// The optimizer.
    pub optimizer: fn() -> ModuleOptimizer,
    /// Micro-batches of a step on a data-parallel rank.
    pub micro_batches: usize,
    /// Mixed precision, as [`MeshStrategy::autocast`](crate::learner::MeshStrategy::autocast).
    pub autocast: bool,
}

impl Default for ModuleRun {
    /// AdamW on one device, in the types of the module.
    fn default() -> Self {
        let optimizer: fn() -> ModuleOptimizer = || AdamWConfig::new().init();
        let (layout, plan) = (ParallelLayout::default(), Plan::auto());
        Self { layout, plan, optimizer, micro_batches: 1, autocast: false }
    }
}

/// What a training step needs of one rank, with ZeRO of the one that owns most. Displayed, it is a table.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// fn fits(plan: &ModulePlan, gibibytes: u64) -> bool {
///     plan.peak() <= gibibytes << 30
/// }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ModulePlan {
    /// The layout.
    pub layout: ParallelLayout,
    /// Micro-batches of a step on a data-parallel rank.
    pub micro_batches: usize,
    /// Elements of all parameters of the module, and of those that are trained.
    pub parameters: [u64; 2],
    /// Bytes of weights.
    pub weights: u64,
    /// Bytes of gradients between two micro-batches.
    pub gradients: u64,
    /// Bytes of the optimizer's states.
    pub states: u64,
    /// The most bytes of a micro-batch's passes next to weights: what the backward pass needs, and its gradients.
    pub passes: u64,
    /// The most bytes of the optimizer's steps next to weights, gradients and states.
    pub step: u64,
    /// What the passes of a micro-batch compute and send.
    pub counts: Counts,
}

impl ModulePlan {
    /// The most bytes at a time: in the passes of a step that is not the first, or in the optimizer's step.
    pub fn peak(&self) -> u64 {
        let added_up = if self.micro_batches > 1 { self.gradients } else { 0 };
        self.weights + self.states + (self.passes + added_up).max(self.gradients + self.step)
    }
}

/// Plans the training of a module whose `loss` is that of a micro-batch. Nothing is computed, and no tensor has memory: a
/// model of any size is planned in seconds.
///
/// What a program reads from a tensor is zeros. Temporary memory inside an operation is not counted. On GPUs elementwise
/// operations run together in one kernel, whose intermediate results need no memory: there the passes need less.
///
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn_megatron::prelude::*;
///
/// let make_model = |device: &Device| LinearConfig::new(8192, 8192).init(device);
/// let loss = |model: &Linear, device: &Device| model.forward(Tensor::<2>::ones([64, 8192], device)).square().mean();
/// let plan = plan_module(make_model, loss, &ModuleRun::default())?;
/// assert_eq!(plan.weights, 4 * 8192 * 8193);
/// assert_eq!((plan.gradients, plan.states), (plan.weights, 2 * plan.weights));
/// println!("{plan}");
/// # Ok::<(), BoxError>(())
/// ```
///
/// # Errors
/// A layout that is not for any module, or not planned, with the nearest that is; a plan that does not fit the module.
///
/// # Panics
/// If the closures do.
pub fn plan_module<M: Module + ModuleDisplay>(
    make_model: impl Fn(&Device) -> M + Sync,
    loss: impl Fn(&M, &Device) -> Tensor<1> + Sync,
    run: &ModuleRun,
) -> Result<ModulePlan, BoxError> {
    for_any_module(&run.layout)?;
    let ParallelLayout { tp, dp, zero, .. } = run.layout;
    if zero > 2 {
        return Err(format!("zero {zero} of a module: what its shards need is not planned; nearest legal: 2").into());
    }
    let sequence = run.layout.sequence_parallel();
    let mesh = Mesh::new(ParallelLayout { tp, sp: run.layout.sp, ..ParallelLayout::default() })?;
    let plans = launch(&mesh, &[Device::flex()], |rank| {
        let meta = MetaDevice::new(&rank, &[Axis::Tp], sequence, run.autocast);
        let device = meta.device().autodiff();
        let model = make_model(&device);
        let parameters = elements(&model);
        let model = if tp > 1 {
            check(&model, &run.plan, tp, sequence)?;
            parallelize(model, &rank, &run.plan)?
        } else {
            model
        };
        let weights = meta.counts().live;
        meta.reset();
        let loss = loss(&model, &device);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        drop(loss);
        let counts = meta.counts();
        let whole = counts.live - weights;
        // Owners hold whole parameters, with their states.
        let own = of_fullest(&model, gradients, [if zero > 0 { dp } else { 1 }, tp]);
        let owned = meta.counts().live - weights;
        let second = again(&model, &own);
        let for_second = meta.counts().live - weights - owned;
        meta.reset();
        let mut optimizer = (run.optimizer)();
        // The first step makes states, the second computes with them.
        let model = optimizer.step(1e-3, model, own);
        let first = meta.counts();
        let states = first.live - weights - for_second;
        meta.reset();
        let model = optimizer.step(1e-3, model, second);
        let most = (first.peak - for_second).max(meta.counts().peak);
        drop(model);
        Ok(ModulePlan {
            layout: run.layout.clone(),
            micro_batches: run.micro_batches,
            parameters,
            weights,
            gradients: if zero == 2 { owned } else { whole },
            states,
            passes: counts.peak - weights,
            step: most.saturating_sub(weights + owned + states),
            counts,
        })
    })?;
    Ok(plans.into_iter().next().expect("a mesh has a rank"))
}

/// Elements of all float parameters, and of the trained ones. Afterwards all parameters exist.
fn elements<M: Module>(module: &M) -> [u64; 2] {
    let mut found = Elements([0, 0]);
    module.visit(&mut found);
    found.0
}

struct Elements([u64; 2]);

impl ModuleVisitor for Elements {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let elements = value.shape().num_elements() as u64;
        self.0[0] += elements;
        self.0[1] += if param.is_require_grad() { elements } else { 0 };
        // Values of a record come to the device with the first operation that uses them.
        drop(value.neg());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        drop(param.base().neg());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        drop(param.base().bool_not());
    }
}
