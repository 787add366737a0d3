//! Proof that a Burn module of one's own trains over ranks as on one device, in double precision.

mod bound;
mod compare;
mod error;
mod stages;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::sync::Arc;

use backend_dist::gpu;
use backend_dist::mesh::ParallelLayout;
use backend_dist::parallelize::Plan;
use backend_dist::paths::PathVisitor;
use burn::module::{Module, ModuleDisplay, Param};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::{DType, Device, FloatDType, Tensor};

use crate::learner::{ModuleSteps, for_any_module};
use crate::schedule::ScheduleKind;
use crate::verify::{Candidate, Line, TOLERANCE};
pub use bound::ON_GPUS;
use bound::bound;
use compare::compare;
pub use error::{ModuleError, ModuleReport};
use models::Recompute;
pub use stages::{verify_stages, verify_stages_as};

/// Optimizer steps of every layout.
const STEPS: usize = 3;
/// The fewest items of a step, over all ranks.
const ITEMS: usize = 8;
/// Of the device's generator when the model is made.
const SEED: u64 = 1234;

/// Trains a module for three steps of AdamW with stock Burn on one CPU device, and from the same values in every layout
/// on CPU ranks. Each loss, gradient and parameter must be that of the one device to 1e-10 of its norm, in `f64`; of a
/// module with burn-nn's `RmsNorm` or `DeformConv2d`, which Burn computes in `f32`, to 1e-5.
/// A norm counts as at least a thousandth of the step's largest, because a gradient whose terms cancel is rounding.
///
/// - `make_model` makes the module on a device whose generator is seeded and whose floats are `f64`.
/// - `loss` is the mean loss of some items of a data set, by number. A step of all layouts has the same items: at least
///   8, and a multiple of the number of ranks. One device computes them at once, a rank its share of them. Three steps
///   use as many items each, numbered from 0.
/// - `layouts` may have tensor, sequence and data parallelism and ZeRO 0 to 3. [`Plan::auto`] says which parameters are
///   sharded; [`verify_module_as`] takes another plan.
///
/// A module that mixes the items of a batch or draws random numbers (`BatchNorm`, `Dropout`) is another function on
/// ranks, and refused as such: make it without.
///
/// The process must not have made a tensor on the CPU before: the first one decides that floats are `f32`. A file under
/// `tests/` is a process of its own.
///
/// ```no_run
/// use burn::nn::loss::MseLoss;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::prelude::*;
/// use burn_megatron::prelude::*;
///
/// let make_model = |device: &Device| LinearConfig::new(2, 1).init(device);
/// let loss = |model: &Linear, items: std::ops::Range<usize>, device: &Device| {
///     let x: Vec<f64> = items.flat_map(|item| [item as f64 / 9.0, (item % 3) as f64]).collect();
///     let x = Tensor::<1>::from_data(x.as_slice(), device).reshape([-1, 2]);
///     MseLoss::new().forward(model.forward(x.clone()), x.sum_dim(1), burn::nn::loss::Reduction::Mean)
/// };
/// let report = verify_module(make_model, loss, &["DP2".parse()?, "DP4 ZeRO2".parse()?])?;
/// println!("{report}");
/// # Ok::<(), BoxError>(())
/// ```
///
/// # Errors
/// If a layout differs or fails, with the layout, the worst difference and the path of its parameter; if a layout is
/// not for any module; if a parameter is not `f64`.
///
/// # Panics
/// If the closures do on one device.
pub fn verify_module<M: Module + ModuleDisplay + 'static>(
    make_model: impl FnOnce(&Device) -> M,
    loss: impl Fn(&M, Range<usize>, &Device) -> Tensor<1> + Send + Sync + 'static,
    layouts: &[ParallelLayout],
) -> Result<ModuleReport, ModuleError> {
    verify_module_as(make_model, loss, layouts, &Proof::default())
}

/// How [`verify_module_as`] trains.
///
/// ```
/// use burn::optim::MuonConfig;
/// use burn_megatron::prelude::*;
///
/// let proof = Proof::default().plan(Plan::auto().columns("gate|up").rows("down")).optimizer(|| MuonConfig::new().init());
/// ```
#[derive(Clone, Debug)]
pub struct Proof {
    plan: Plan,
    optimizer: fn() -> ModuleOptimizer,
    micro_batches: Option<usize>,
    schedule: Option<ScheduleKind>,
    recompute: Recompute,
    overlap: bool,
    devices: Vec<Device>,
    double_throughout: bool,
}

impl Default for Proof {
    fn default() -> Self {
        Self {
            plan: Plan::auto(),
            optimizer: || AdamWConfig::new().with_weight_decay(0.1).init(),
            micro_batches: None,
            schedule: None,
            recompute: Recompute::default(),
            overlap: false,
            devices: vec![Device::flex()],
            double_throughout: false,
        }
    }
}

impl Proof {
    /// Which parameters tensor parallelism shards.
    pub fn plan(mut self, plan: Plan) -> Self {
        self.plan = plan;
        self
    }

    /// The optimizer instead of AdamW.
    pub fn optimizer(mut self, optimizer: fn() -> ModuleOptimizer) -> Self {
        self.optimizer = optimizer;
        self
    }

    /// Rank `r` runs on `devices[r % devices.len()]` instead of a CPU; the one device is a CPU always. Whatever the layout,
    /// GPUs are logical devices, as in `train`. The bound is [`ON_GPUS`] there.
    ///
    /// # Panics
    /// If there is none.
    pub fn devices(mut self, devices: Vec<Device>) -> Self {
        assert!(!devices.is_empty(), "devices: there is none; nearest legal: 1");
        self.devices = devices;
        self
    }

    /// All layers compute in `f64` if their parameters are: the bound is 1e-10 also if one has the name of a layer of Burn that
    /// computes in `f32`, such as `RmsNorm`.
    pub fn double_throughout(mut self) -> Self {
        self.double_throughout = true;
        self
    }

    /// Largest relative difference that passes.
    fn bound<M: Module>(&self, module: &M) -> f64 {
        let on_cpus = if self.double_throughout { TOLERANCE } else { bound(module) };
        let has_gpus = self.devices.iter().any(|device| gpu::index(device).is_some());
        if has_gpus { ON_GPUS.max(on_cpus) } else { on_cpus }
    }

    /// Of [`verify_module_as`]: with ZeRO 0 to 2 gradients are reduced during the backward pass, as
    /// [`MeshStrategy::overlap_grad_reduce`] does.
    ///
    /// [`MeshStrategy::overlap_grad_reduce`]: crate::learner::MeshStrategy::overlap_grad_reduce
    pub fn overlap_grad_reduce(mut self) -> Self {
        self.overlap = true;
        self
    }

    /// Of [`verify_stages_as`]: micro-batches of a step on each data-parallel rank. Without it twice the pipeline ranks,
    /// or 1 without a pipeline.
    pub fn micro_batches(mut self, micro_batches: usize) -> Self {
        self.micro_batches = Some(micro_batches);
        self
    }

    /// Of [`verify_stages_as`]: the schedule of pipelines, as [`MeshStrategy::schedule`].
    ///
    /// [`MeshStrategy::schedule`]: crate::learner::MeshStrategy::schedule
    pub fn schedule(mut self, schedule: ScheduleKind) -> Self {
        self.schedule = Some(schedule);
        self
    }

    /// Of [`verify_stages_as`]: which blocks run their forward pass again in the backward pass.
    pub fn recompute(mut self, recompute: Recompute) -> Self {
        self.recompute = recompute;
        self
    }
}

/// [`verify_module`] with a plan and an optimizer.
///
/// # Panics
/// If the closures do on one device.
pub fn verify_module_as<M: Module + ModuleDisplay + 'static>(
    make_model: impl FnOnce(&Device) -> M,
    loss: impl Fn(&M, Range<usize>, &Device) -> Tensor<1> + Send + Sync + 'static,
    layouts: &[ParallelLayout],
    proof: &Proof,
) -> Result<ModuleReport, ModuleError> {
    layouts.iter().try_for_each(|layout| for_any_module(layout).map_err(ModuleError::Layout))?;
    if proof.micro_batches.is_some() || proof.schedule.is_some() || proof.recompute != Recompute::default() {
        return Err(ModuleError::Stages);
    }
    let device = double_precision(proof)?.autodiff();
    device.seed(SEED);
    let module = make_model(&device).fork(&device);
    all_double(&module)?;
    let ranks = layouts.iter().map(|layout| layout.dp).fold(1, lcm);
    let items = ITEMS.next_multiple_of(ranks);
    let (loss, optimizer, overlap) = (Arc::new(loss), proof.optimizer, proof.overlap);
    let steps = ModuleSteps { loss, steps: STEPS, items, optimizer, overlap };
    let one = steps.one_device(&module);
    let bound = proof.bound(&module);
    let line = |layout: &ParallelLayout| {
        let ranks = steps.over_ranks(&module, layout, &proof.plan, &proof.devices);
        let candidate = Candidate { layout: layout.clone(), ..Candidate::default() };
        Line { candidate, outcome: ranks.map(|ranks| compare(&one, &ranks, bound)), rerouted: 0.0 }
    };
    let report = ModuleReport { lines: layouts.iter().map(line).collect() };
    if report.lines.iter().all(Line::passes) { Ok(report) } else { Err(ModuleError::Different(report)) }
}

/// The CPU. Its floats, and those of the ranks' devices, are `f64` where nothing else is said.
fn double_precision(proof: &Proof) -> Result<Device, ModuleError> {
    for mut device in [Device::flex()].into_iter().chain(proof.devices.iter().cloned()) {
        let configured = device.configure(FloatDType::F64);
        match device.settings().float_dtype {
            FloatDType::F64 => {}
            other => {
                let why = configured.err().map(|error| error.to_string());
                return Err(ModuleError::Precision { device: format!("{device:?}"), float: other, why });
            }
        }
    }
    Ok(Device::flex())
}

fn all_double<M: Module>(module: &M) -> Result<(), ModuleError> {
    Other { found: None }.walk(module).found.map_or(Ok(()), Err)
}

/// The first parameter that is not `f64`.
struct Other {
    found: Option<ModuleError>,
}

impl PathVisitor for Other {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let dtype = param.val().dtype();
        if dtype != DType::F64 && self.found.is_none() {
            self.found = Some(ModuleError::Parameter { path: path.to_string(), dtype });
        }
    }
}

/// Least common multiple.
fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}
