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

use std::collections::{HashMap, HashSet};

use backend_dist::collective::all_reduce;
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::gradients::dtypes;
use backend_dist::local::to_local;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Tensor};

use super::zero::Replace;

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

/// The values of `states`, flat, in visiting order.
struct Values<'a> {
    states: &'a HashSet<ParamId>,
    seen: HashSet<ParamId>,
    values: Vec<(ParamId, DType, Tensor<1>)>,
}

impl ModuleVisitor for Values<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.states.contains(&param.id) && self.seen.insert(param.id) {
            let value = to_local(param.val().without_autodiff());
            let length = value.shape().num_elements();
            self.values.push((param.id, value.dtype(), value.reshape([length])));
        }
    }
}
