//! States that a module's forward pass updates, such as the running statistics of `nn::BatchNorm`.
//!
//! Burn keeps them in [`RunningState`]s, which all clones of a module share. So a rank trains a model whose states are
//! its own ([`with_own_states`]), and the ranks' states are averaged when somebody is to read them
//! ([`average_states`]): once an epoch, after its last step. Running statistics are linear in the batch statistics,
//! so that gives what an average after every step would.
//!
//! [`RunningState`]: burn::module::RunningState

#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::{HashMap, HashSet};

use backend_dist::collective::all_reduce;
use backend_dist::comm::{Group, ReduceOp};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};

use super::flat_grads::dtypes;
use super::zero::Replace;

/// The ids of the running states of `module`, the same on every rank.
pub(super) fn running_states<M: Module>(module: &M) -> HashSet<ParamId> {
    // A visitor sees a state as a parameter that does not require gradients, but as one that is made for the visit: a
    // parameter of the module is in the same memory every time. What the first visit saw lives until the second ends,
    // so that no address is used twice.
    let visit = || {
        let mut addresses = Addresses::default();
        module.visit(&mut addresses);
        addresses
    };
    let (first, second) = (visit(), visit());
    let differ = first.addresses.iter().zip(&second.addresses).filter(|(first, second)| first != second);
    differ.map(|((id, _), _)| *id).collect()
}

/// `module` with the values of its states, but states of its own.
pub(super) fn with_own_states<M: Module>(module: &M) -> M {
    // The only methods of a module that make new states. They keep ids, values and what is trained; gradient
    // checkpointing comes back with the fork to the rank's device.
    module.valid().train()
}

/// Sets the `states` of `module` to their mean over `group`. Every rank must call it, with its own states.
pub(super) fn average_states<M: Module>(module: M, states: &HashSet<ParamId>, group: &Group) -> M {
    // A state holds back its last update; a validation copy has it applied.
    drop(module.valid());
    let mut found = Values { states, seen: HashSet::new(), values: Vec::new() };
    module.visit(&mut found);
    let found = found.values;
    let mut means = HashMap::new();
    for dtype in dtypes(found.iter().map(|(_, dtype, _)| *dtype)) {
        let members: Vec<_> = found.iter().filter(|(_, of, _)| *of == dtype).collect();
        let bucket = Tensor::cat(members.iter().map(|(_, _, value)| value.clone()).collect(), 0);
        let mean = all_reduce(bucket, ReduceOp::Sum, group).div_scalar(group.size() as f64);
        let mut start = 0;
        for (id, _, value) in members {
            let length = value.shape().num_elements();
            means.insert(*id, mean.clone().narrow(0, start, length));
            start += length;
        }
    }
    module.map(&mut Replace { values: means })
}

/// Where the float parameters are that do not require gradients, in visiting order.
#[derive(Default)]
struct Addresses {
    addresses: Vec<(ParamId, usize)>,
    /// Clones, which share memory with what was visited.
    alive: Vec<Box<dyn Any>>,
}

impl ModuleVisitor for Addresses {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_initialized() || param.is_require_grad() {
            return;
        }
        let tensor: &Tensor<D> = param;
        self.addresses.push((param.id, std::ptr::from_ref(tensor).addr()));
        self.alive.push(Box::new(param.clone()));
    }
}

/// The values of `states`, flat, in visiting order.
struct Values<'a> {
    states: &'a HashSet<ParamId>,
    seen: HashSet<ParamId>,
    values: Vec<(ParamId, DType, Tensor<1>)>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.states.contains(&param.id) && self.seen.insert(param.id) {
            let value = param.val().without_autodiff();
            let length = value.shape().num_elements();
            self.values.push((param.id, value.dtype(), value.reshape([length])));
        }
    }
}
