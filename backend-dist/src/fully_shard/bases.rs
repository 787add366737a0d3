//! What a rank holds of the parameters of a module.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;

use super::gathers::Gathers;
use crate::local::to_local;

/// What this rank holds of every parameter of `gathers`, of which `indices` says where it is in `module`, and the ids of
/// those that are sharded.
pub(super) fn of<M: Module>(
    module: &M,
    indices: &HashMap<String, usize>,
    gathers: &Gathers,
) -> (Vec<Option<Tensor<1>>>, HashSet<ParamId>) {
    let (values, ids) = (vec![None; gathers.len()], HashSet::new());
    let mut bases = Bases { indices, gathers, path: Vec::new(), values, ids };
    module.visit(&mut bases);
    (bases.values, bases.ids)
}

/// What this rank holds of every parameter, flat: all of it, or one element.
struct Bases<'a> {
    indices: &'a HashMap<String, usize>,
    gathers: &'a Gathers,
    path: Vec<String>,
    values: Vec<Option<Tensor<1>>>,
    /// Of the parameters that are sharded.
    ids: HashSet<ParamId>,
}

impl ModuleVisitor for Bases<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&index) = self.indices.get(&self.path.join(".")) else { return };
        self.ids.insert(param.id);
        let base = to_local(param.base().without_autodiff());
        let own = self.gathers.is_owner(index);
        self.values[index] = Some(if own { base.flatten(0, D - 1) } else { first(base) });
    }
}

/// The first element, as a tensor of one.
fn first<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.slice([(); D].map(|()| 0..1)).reshape([1])
}
