//! What a rank holds of the parameters of a module, and of their gradients.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::gathers::Gathers;
use crate::local::{Placements, to_local};
use crate::paths::PathVisitor;

/// What this rank holds of every parameter of `gathers`, of which `indices` says where it is in `module`, and the ids of
/// those that are sharded.
pub(super) fn of<M: Module>(
    module: &M,
    indices: &HashMap<String, usize>,
    gathers: &Gathers,
) -> (Vec<Option<Tensor<1>>>, HashSet<ParamId>) {
    let (values, ids) = (vec![None; gathers.len()], HashSet::new());
    let bases = Bases { indices, gathers, values, ids }.walk(module);
    (bases.values, bases.ids)
}

/// What this rank holds of every parameter, flat: all of it, or one element.
struct Bases<'a> {
    indices: &'a HashMap<String, usize>,
    gathers: &'a Gathers,
    values: Vec<Option<Tensor<1>>>,
    /// Of the parameters that are sharded.
    ids: HashSet<ParamId>,
}

impl PathVisitor for Bases<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let Some(&index) = self.indices.get(path) else { return };
        self.ids.insert(param.id);
        let base = to_local(param.base().without_autodiff());
        let own = self.gathers.is_owner(index);
        self.values[index] = Some(if own { base.flatten(0, D - 1) } else { first(base) });
    }
}

/// Adds gradients, flat and by field, to those of `module`. Of two fields with one parameter the last one's stays, as in
/// [`GradientsParams::from_grads`].
pub(super) fn register<M: Module>(
    module: &M,
    means: HashMap<Arc<str>, Tensor<1>>,
    grads: GradientsParams,
) -> GradientsParams {
    Register { means, grads }.walk(module).grads
}

struct Register {
    means: HashMap<Arc<str>, Tensor<1>>,
    grads: GradientsParams,
}

impl PathVisitor for Register {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Some(mean) = self.means.remove(path) {
            let base = param.base();
            let placements = Placements::of(&base);
            let mean = mean.reshape(placements.local_shape(base.shape()));
            self.grads.register::<D>(param.id, placements.from_local(mean));
        }
    }
}

/// Looks for gradients of what stands in for another rank's value.
///
/// # Panics
/// If there is one: the forward pass computed with it.
pub(super) fn refuse_stand_ins<M: Module>(
    module: &M,
    indices: &HashMap<String, usize>,
    gathers: &Gathers,
    grads: &GradientsParams,
) {
    StandIns { indices, gathers, grads }.walk(module);
}

struct StandIns<'a> {
    indices: &'a HashMap<String, usize>,
    gathers: &'a Gathers,
    grads: &'a GradientsParams,
}

impl PathVisitor for StandIns<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let is_others = self.indices.get(path).is_some_and(|&index| !self.gathers.is_owner(index));
        assert!(
            !is_others || self.grads.get::<D>(param.id).is_none(),
            "parameter `{path}` is on another rank, and the forward pass read what is here of it, which is NaN: ZeRO 3 gathers a \
             parameter in `Param::val()`; nearest legal: `param.val()` instead of `*param`, a method by `&self` or `Param::map`, \
             or ZeRO 2"
        );
    }
}

/// The first element, as a tensor of one.
fn first<const D: usize>(x: Tensor<D>) -> Tensor<1> {
    x.slice([(); D].map(|()| 0..1)).reshape([1])
}
