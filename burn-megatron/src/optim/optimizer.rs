//! AdamW over a module's parameters: takes gradients out of a backward pass, reduces them, and rebuilds the parameters.

use super::adamw::{AdamWConfig, Coefficients};
use super::plan::BucketPlan;
use super::store::{GradStore, State, store_for};
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::shard::Registry;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Gradients, Tensor};
use std::borrow::Cow;

/// A module and a registry that do not describe the same parameters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptimError {
    /// The module holds a float parameter that the registry does not know.
    #[error(
        "parameter {id:#x} of shape {shape:?} is in the module but not in the registry: build it with `ParamBuilder`"
    )]
    Unregistered {
        /// Burn's parameter id.
        id: u64,
        /// Local shape.
        shape: Vec<usize>,
    },
    /// The registered number of elements is another one.
    #[error("parameter `{name}` has shape {shape:?}, but {registered} elements are registered")]
    Length {
        /// Name of the parameter.
        name: String,
        /// Local shape in the module.
        shape: Vec<usize>,
        /// Elements that the registry says.
        registered: usize,
    },
    /// The module holds a registered parameter never or more than once.
    #[error(
        "parameter `{name}` is in the module {times} times, it must be once: a tied weight is used twice, not held twice"
    )]
    Times {
        /// Name of the parameter.
        name: String,
        /// How often.
        times: usize,
    },
}

/// The optimizer of one rank.
pub struct Optimizer {
    plan: BucketPlan,
    store: Box<dyn GradStore>,
    config: AdamWConfig,
    updates: u64,
}

impl Optimizer {
    /// Buffers and states for the parameters of `model`.
    ///
    /// # Errors
    /// Where `model` and `registry` disagree.
    ///
    /// # Panics
    /// If the model has no parameters.
    pub fn new<M: Module>(model: &M, registry: &Registry, config: AdamWConfig) -> Result<Self, OptimError> {
        let plan = BucketPlan::new(registry);
        let mut check = Check { plan: &plan, times: vec![0; plan.slots.len()], sample: None, error: None };
        model.visit(&mut check);
        let Check { times, sample, error, .. } = check;
        if let Some(error) = error {
            return Err(error);
        }
        if let Some((slot, times)) = plan.slots.iter().zip(times).find(|(_, times)| *times != 1) {
            return Err(OptimError::Times { name: slot.name.clone(), times });
        }
        let store = store_for(&sample.expect("a model has parameters"), &plan);
        Ok(Self { plan, store, config, updates: 0 })
    }

    /// Where each parameter lies in the flat buffer.
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// The constants of AdamW.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// Updates done so far.
    pub fn updates(&self) -> u64 {
        self.updates
    }

    /// What is kept of the parameter in slot `slot` of the plan: element type and bytes; see [`GradStore::state`].
    pub fn state(&self, state: State, slot: usize) -> Option<(DType, Cow<'_, [u8]>)> {
        self.store.state(state, self.plan.slots[slot].range.clone())
    }

    /// Replaces what is kept of the parameter in slot `slot` of the plan.
    ///
    /// # Panics
    /// If there are not as many values as elements.
    pub fn set_state(&mut self, state: State, slot: usize, values: Vec<f64>) {
        let range = self.plan.slots[slot].range.clone();
        assert_eq!(values.len(), range.len(), "{}: values of {state:?}", self.plan.slots[slot].name);
        self.store.set_state(state, range, values);
    }

    /// Goes on counting updates from here.
    pub fn set_updates(&mut self, updates: u64) {
        self.updates = updates;
    }

    /// Takes the gradients of one backward pass out of `grads` and adds them to the main gradients; `first` starts a
    /// new sum.
    pub fn accumulate<M: Module>(&mut self, model: &M, mut grads: Gradients, first: bool) {
        model.visit(&mut Accumulate { plan: &self.plan, store: self.store.as_mut(), grads: &mut grads, first });
    }

    /// Completes the gradient sums in Megatron's order (megatron/core/distributed/finalize_model_grads.py): over the
    /// ranks that hold the same weights, then what is partial over `tensor_parallel` neighbours (norms under sequence
    /// parallelism, key/value heads that several ranks share). `neighbours` gives the rank's block of so many ranks of
    /// its tensor parallel group.
    pub fn reduce(&mut self, replicas: &Group, neighbours: impl Fn(usize) -> Group) {
        self.store.all_reduce(replicas);
        for (ranks, ranges) in &self.plan.partial {
            self.store.all_reduce_ranges(ranges, &neighbours(*ranks));
        }
    }

    /// Global norm of the main gradients times `scale`, every element of the model counted once. `model_parallel` are
    /// the ranks that together hold the model.
    pub fn norm(&self, scale: f64, model_parallel: &Group) -> f64 {
        let squares = self.store.sum_of_squares(&self.plan.owned);
        model_parallel.all_reduce_scalar(squares, ReduceOp::Sum).sqrt() * scale
    }

    /// The main gradients times `scale`, flat, by [`Optimizer::plan`].
    pub fn gradients(&self, scale: f64) -> Vec<f64> {
        self.store.gradients().into_iter().map(|g| g * scale).collect()
    }

    /// One update of all parameters with the main gradients times `grad_scale`. On CPU ranks parameters are changed in
    /// place unless somebody else holds their storage.
    pub fn step<M: Module>(&mut self, model: M, lr: f64, grad_scale: f64) -> M {
        self.updates += 1;
        let coefficients = self.config.coefficients(lr, self.updates, grad_scale);
        model.map(&mut Update { plan: &self.plan, store: self.store.as_mut(), coefficients: &coefficients })
    }
}

struct Check<'a> {
    plan: &'a BucketPlan,
    times: Vec<usize>,
    sample: Option<Tensor<1>>,
    error: Option<OptimError>,
}

impl ModuleVisitor for Check<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let (id, shape) = (param.id.val(), param.lazy_shape().to_vec());
        match self.plan.index(id).map(|index| (index, &self.plan.slots[index])) {
            None => self.error = Some(OptimError::Unregistered { id, shape }),
            Some((_, slot)) if slot.range.len() != shape.iter().product::<usize>() => {
                self.error = Some(OptimError::Length { name: slot.name.clone(), shape, registered: slot.range.len() });
            }
            Some((index, _)) => self.times[index] += 1,
        }
        self.sample.get_or_insert_with(|| flat(param.val()));
    }
}

/// The values in one dimension, without autodiff; shares the storage.
fn flat<const D: usize>(tensor: Tensor<D>) -> Tensor<1> {
    tensor.inner().flatten(0, D - 1)
}

struct Accumulate<'a> {
    plan: &'a BucketPlan,
    store: &'a mut dyn GradStore,
    grads: &'a mut Gradients,
    first: bool,
}

impl ModuleVisitor for Accumulate<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let slot = &self.plan.slots[self.plan.index(param.id.val()).expect("parameters keep their ids")];
        let grad = param.val().grad_remove(self.grads).map(flat);
        self.store.accumulate(slot.range.clone(), grad, self.first);
    }
}

struct Update<'a> {
    plan: &'a BucketPlan,
    store: &'a mut dyn GradStore,
    coefficients: &'a Coefficients,
}

impl ModuleMapper for Update<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let slot = &self.plan.slots[self.plan.index(id.val()).expect("parameters keep their ids")];
        let (shape, tracked) = (tensor.dims(), tensor.is_autodiff());
        let decays = slot.weight_decay || self.coefficients.config.decay_vectors;
        let updated = self.store.update(slot.range.clone(), flat(tensor), decays, self.coefficients);
        let updated: Tensor<D> = updated.reshape(shape);
        let leaf = if tracked { Tensor::from_inner(updated).require_grad() } else { updated };
        Param::from_mapped_value(id, leaf, mapper)
    }
}
