//! Which values of a module are states that its forward pass updates.

use std::any::Any;
use std::collections::HashSet;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

/// The ids of the running states of `module` ([`RunningState`], as `nn::BatchNorm` has), the same on every rank.
///
/// They are no parameters: each rank updates its own, and what is attached to them is lost.
///
/// [`RunningState`]: burn::module::RunningState
pub fn running_states<M: Module>(module: &M) -> HashSet<ParamId> {
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
