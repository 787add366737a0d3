//! ZeRO 3 (fully sharded data parallelism) for any Burn module: the value of a parameter is on one rank, its owner, and
//! on the others only while they use it.
//!
//! [`fully_shard`] attaches a [`Reparameterization`] to each large parameter. `Param::val()` then gathers the value, the
//! backward pass gathers it again and reduces its gradient to the owner. Whole parameters have owners, so any of Burn's
//! optimizers steps them as on one device, and nothing is padded; the largest parameter is the limit of what is saved.
//!
//! ```
//! use backend_dist::{fully_shard::{Units, fully_shard}, launch::launch, mesh::{Axis, Mesh}};
//! use burn::module::Module;
//! use burn::nn::LinearConfig;
//! use burn::optim::{GradientsParams, SgdConfig};
//! use burn::tensor::{Device, Tensor};
//!
//! let device = Device::flex().autodiff().gradient_checkpointing();
//! let model = LinearConfig::new(4, 3).init(&device);
//! let expected = {
//!     let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum();
//!     let grads = GradientsParams::from_grads(loss.backward(), &model);
//!     SgdConfig::new().init().step(0.1, model.clone(), grads).weight.val().into_data()
//! };
//! let ranks = launch(&Mesh::new("DP2".parse()?)?, &[Device::flex()], |rank| {
//!     let model = fully_shard(model.clone().fork(&device), &rank.group(Axis::Dp), &Units::auto().keep_below(0));
//!     let loss = model.forward(Tensor::<2>::ones([1, 4], &device)).sum();
//!     let grads = GradientsParams::from_grads(loss.backward(), &model);
//!     Ok(SgdConfig::new().init().step(0.1, model, grads).into_record())
//! })?;
//! for record in ranks {
//!     // Records are those of the module on one device.
//!     assert_eq!(model.clone().load_record(record).weight.val().into_data(), expected);
//! }
//! # Ok::<(), backend_dist::launch::BoxError>(())
//! ```

mod bases;
mod gathers;
#[cfg(feature = "decorator")]
mod logical;
mod op;
mod owned;
mod owners;
mod place;
mod reductions;
mod sequence;
mod states;
#[cfg(test)]
mod tests;
mod together;
mod units;

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, Param, ParamId, Reparameterization, Reparameterizer};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};

use crate::gradients::{average_gradients_of, clip_grad_norm};
use crate::local::Placements;
pub use gathers::Counts;
use gathers::Gathers;
use op::{Sharding, unshard};
pub use owners::Owners;
use place::{moved, stand_in};
use ranks::comm::Group;
pub use states::running_states;
pub use units::Units;

/// Shards the parameters of `module` over `group`, all of whose members must call it with clones of one module.
///
/// - Gradients are means over the group; a gradient exists on the owner only, except of parameters that stay whole.
/// - All ranks must use the same parameters in the same order: a forward pass, a backward pass, `into_record`,
///   `load_record` and `materialize` are collectives.
/// - Parameters that were not drawn yet are drawn here, on their device, one at a time.
/// - A frozen parameter is gathered once in a forward pass and saved for backward where that needs it.
/// - Put the module on a device with `gradient_checkpointing`. Without it, operations that keep a view of a weight, as
///   burn-nn's `Linear` does, keep the gathered weight until the backward pass.
/// - A parameter with a reparameterization of its own, as those of Burn's `Lora`, stays whole; the adapter is sharded.
/// - A `ModuleMapper` may change values, on their owners. `Param::map` of a field drops what gathers it, and a method of `Tensor`
///   called on a `Param` does not gather it: ranks that do not own it compute with NaN then. `LBFGS`, which steps all parameters together, needs [`FullyShard::gather_gradients`].
///
/// # Panics
/// If such a parameter is trained: nothing would average its gradients. [`FullyShard::end_pass`] does.
pub fn fully_shard<M: Module>(module: M, group: &Group, units: &Units) -> M {
    if let Some(path) = units::Reparameterized::of(&module).trained {
        panic!(
            "`{path}` is trained and has a reparameterization, so that its gradients are not averaged; nearest legal: \
             FullyShard with begin_pass and end_pass"
        );
    }
    FullyShard::new(&module, group, units).shard(module)
}

/// How a module is sharded: for programs that train many steps, values come ahead of their use and gradients are reduced
/// while the backward pass continues.
///
/// ```no_run
/// # use burn::{module::Module, optim::{GradientsParams, ModuleOptimizer}, tensor::Tensor};
/// # use backend_dist::{comm::Group, fully_shard::{FullyShard, Units}};
/// # fn train<M: Module>(model: M, group: &Group, optimizer: &mut ModuleOptimizer, loss: impl Fn(&M) -> Tensor<1>) {
/// let shards = FullyShard::new(&model, group, &Units::auto());
/// let mut model = shards.shard(model);
/// for _ in 0..100 {
///     shards.begin_pass(&model);
///     let grads = GradientsParams::from_grads(loss(&model).backward(), &model);
///     let grads = shards.end_pass(&model, grads);
///     model = optimizer.step(1e-3, model, grads);
/// }
/// # }
/// ```
#[derive(Clone)]
pub struct FullyShard {
    owners: Arc<Owners>,
    /// By path: a parameter takes the id of a record that it loads.
    indices: Arc<HashMap<String, usize>>,
    gathers: Arc<Gathers>,
    device: Option<Device>,
}

impl FullyShard {
    /// Decides who owns which parameter of `module`, the same on every rank.
    pub fn new<M: Module>(module: &M, group: &Group, units: &Units) -> Self {
        Self::of_some(module, group, units, (|_| true, |_| None))
    }

    /// [`new`](Self::new) of the parameters `of`, and those for which `given` has an owner have that; the others stay whole.
    pub fn of_some<M: Module>(
        module: &M,
        group: &Group,
        units: &Units,
        (of, given): (impl Fn(ParamId) -> bool, impl Fn(ParamId) -> Option<usize>),
    ) -> Self {
        let found = units::Find::of(module, units, &of);
        let owners = Owners::of_found(&found, group.size(), given);
        let indices = found.paths;
        let params = found.params.into_iter().map(|param| owned::Gathered {
            owner: owners.owner(param.id).expect("every parameter found has an owner"),
            unit: param.unit,
            is_matrix: param.is_matrix,
            length: param.local,
        });
        let gathers = Gathers::new(params.collect(), group.clone());
        Self { owners: owners.into(), indices: Arc::new(indices), gathers: gathers.into(), device: None }
    }

    /// Every rank's values go to `device`; of a module on the host, only those that the rank owns do.
    pub fn on(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// Blocks of the module run again in backward passes, so that a pass may use a parameter after it had its gradient.
    /// Without this a pass has one backward pass, and panics if another comes: the gradients of all would count.
    pub fn recomputing(self) -> Self {
        self.gathers.recompute();
        self
    }

    /// `module` with its large parameters on their owners.
    pub fn shard<M: Module>(&self, module: M) -> M {
        module.apply_reparameterization(self.clone())
    }

    /// Which rank owns the parameters that are sharded.
    pub fn owners(&self) -> &Arc<Owners> {
        &self.owners
    }

    /// Starts a forward pass of `module`, and a backward pass if one follows: from the second pass on values come ahead
    /// of their use, in the order of the pass before. The gradients are not ready before [`end_pass`](Self::end_pass).
    pub fn begin_pass<M: Module>(&self, module: &M) {
        let (values, ids) = bases::of(module, &self.indices, &self.gathers);
        self.gathers.begin_pass(values, ids);
    }

    /// Ends a pass of `module`: adds the gradients that were on their way, and averages those of parameters that stay whole.
    ///
    /// # Panics
    /// If the pass read a parameter of another rank without `Param::val()`.
    pub fn end_pass<M: Module>(&self, module: &M, grads: GradientsParams) -> GradientsParams {
        bases::refuse_stand_ins(module, &self.indices, &self.gathers, &grads);
        let (sharded, means) = self.gathers.end_pass();
        let grads = bases::register(module, means, grads);
        average_gradients_of(module, grads, self.gathers.group(), |id| !sharded.contains(&id))
    }

    /// Clips the gradients that [`end_pass`](Self::end_pass) gave by the norm of those of all ranks, as FSDP's
    /// `clip_grad_norm_`. Returns the norm too. Every rank must call it.
    pub fn clip_grad_norm<M: Module>(
        &self,
        module: &M,
        grads: GradientsParams,
        max_norm: f64,
    ) -> (GradientsParams, f64) {
        let group = self.gathers.group();
        // Those of parameters that stay whole are equal on all ranks.
        let counts = |id| self.owners.owner(id).unwrap_or(0) == group.rank();
        clip_grad_norm(module, grads, max_norm, counts, &[group])
    }

    /// How often values were gathered and gradients reduced since the last call.
    pub fn take_counts(&self) -> Counts {
        self.gathers.take_counts()
    }

    /// From now on `into_record` gives whole values on member `member` only; the others' records are not to be used.
    pub fn record_on(&self, member: usize) {
        self.gathers.record_on(member);
    }
}

impl Reparameterizer for FullyShard {
    type Reparam = Sharded;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Sharded>) {
        let (gathers, index) = (self.gathers.clone(), self.indices.get(path).copied());
        let path = Arc::from(path);
        let place = |value| match &self.device {
            Some(device) => moved(value, device),
            None => value,
        };
        let Some(owned) = index else {
            let param = param.map(place);
            let value = param.base();
            let (placements, checkpointing) = (Placements::of(&value), value.gradient_checkpointing_strategy());
            return (param, Some(Sharded { sharding: Sharding { gathers, index, path, placements, checkpointing } }));
        };
        let (id, value, mapper) = param.consume();
        let placements = Placements::of(&value);
        let base = if gathers.is_owner(owned) { place(value) } else { stand_in(&value, self.device.as_ref()) };
        let checkpointing = base.gradient_checkpointing_strategy();
        let sharding = Sharding { gathers, index, path, placements, checkpointing };
        // A parameter has one mapper, so what it does by itself, as one saved with `LinearLayout::Col`, is done here.
        let (load, save) = ((sharding.clone(), mapper.clone()), (sharding.clone(), mapper.clone()));
        let param = Param::from_mapped_value(id, base, mapper)
            .load_mapper(move |value: Tensor<D>| {
                let value = load.1.on_load(value);
                if load.0.is_owner() { value } else { stand_in(&value, None) }
            })
            .save_mapper(move |base: Tensor<D>| {
                let base = base.without_autodiff();
                let whole = Tensor::from_dispatch(unshard(base.clone().into_dispatch(), save.0.clone()));
                match save.0.gathers.saves() {
                    true => save.1.on_save(whole),
                    false => base.slice([(); D].map(|()| 0..1)),
                }
            });
        (param, Some(Sharded { sharding }))
    }
}

/// Attached to a parameter: its `val()` is gathered.
#[derive(Module, Debug)]
pub struct Sharded {
    #[module(skip)]
    sharding: Sharding,
}

impl Reparameterization for Sharded {
    const NAME: &'static str = "sharded";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        // A mapper that makes new leaves, as one that clips weights, makes them without.
        let base = match self.sharding.checkpointing.filter(|_| base.is_autodiff()) {
            Some(strategy) => base.with_gradient_checkpointing_strategy(strategy),
            None => base,
        };
        Tensor::from_dispatch(unshard(base.into_dispatch(), self.sharding.clone()))
    }
}
