//! The gradients of a module as flat tensors in the order in which the module visits its parameters.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Tensor};

use crate::local::{Placements, to_local};
use ranks::comm::Group;

/// One parameter's gradient on this rank, flat. Of a parameter that is sharded on a logical device, each rank's share.
pub struct FlatGrad {
    /// Of the parameter.
    pub id: ParamId,
    /// Of the gradient.
    pub dtype: DType,
    /// Elements.
    pub length: usize,
    /// `None` when the step did not use the parameter.
    grad: Option<Tensor<1>>,
    device: Device,
}

impl FlatGrad {
    /// The gradient; zeros if this rank did not use the parameter.
    pub fn value(&self) -> Tensor<1> {
        self.grad.clone().unwrap_or_else(|| Tensor::zeros([self.length], (&self.device, self.dtype)))
    }
}

/// Takes the gradients of every parameter `of` which some rank of `group` used out of `grads`, in visiting order, the
/// same on every rank.
pub fn take_used<M: Module>(
    module: &M,
    grads: &mut GradientsParams,
    group: &Group,
    of: impl Fn(ParamId) -> bool,
) -> Vec<FlatGrad> {
    let mut local = Flatten { grads, of: &of, seen: HashSet::new(), params: Vec::new() };
    module.visit(&mut local);
    let used = used_anywhere(&local.params, group);
    local.params.into_iter().zip(used).filter_map(|(param, used)| used.then_some(param)).collect()
}

fn used_anywhere(params: &[FlatGrad], group: &Group) -> Vec<bool> {
    let here: Vec<bool> = params.iter().map(|param| param.grad.is_some()).collect();
    let ranks = group.all_gather_host(here);
    (0..params.len()).map(|index| ranks.iter().any(|rank| rank[index])).collect()
}

/// The number types in order of first use, the same on every rank.
pub fn dtypes(params: impl IntoIterator<Item = DType>) -> Vec<DType> {
    let mut dtypes = Vec::new();
    for dtype in params {
        if !dtypes.contains(&dtype) {
            dtypes.push(dtype);
        }
    }
    dtypes
}

/// Flat values by parameter, slices of `bucket` in the order of `params`.
pub fn split(bucket: &Tensor<1>, params: &[&FlatGrad]) -> Vec<(ParamId, Tensor<1>)> {
    let mut start = 0;
    params
        .iter()
        .map(|param| {
            start += param.length;
            (param.id, bucket.clone().narrow(0, start - param.length, param.length))
        })
        .collect()
}

/// Flat values as gradients in the shapes of the module's parameters.
pub fn into_grads<M: Module>(module: &M, values: HashMap<ParamId, Tensor<1>>) -> GradientsParams {
    put_back(module, values, GradientsParams::new())
}

/// Adds flat values to `grads` in the shapes of the module's parameters.
pub(super) fn put_back<M: Module>(
    module: &M,
    values: HashMap<ParamId, Tensor<1>>,
    grads: GradientsParams,
) -> GradientsParams {
    let mut restore = Restore { values, grads };
    module.visit(&mut restore);
    restore.grads
}

struct Flatten<'a> {
    grads: &'a mut GradientsParams,
    of: &'a dyn Fn(ParamId) -> bool,
    /// A module may hold one parameter in two fields; its gradient is one.
    seen: HashSet<ParamId>,
    params: Vec<FlatGrad>,
}

impl ModuleVisitor for Flatten<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !(self.of)(param.id) || !self.seen.insert(param.id) {
            return;
        }
        let value = param.val();
        let length = Placements::of(&value).local_shape(value.shape()).num_elements();
        let grad = self.grads.remove::<D>(param.id).map(|grad| to_local(grad).reshape([length]));
        let dtype = grad.as_ref().map_or(value.dtype(), Tensor::dtype);
        self.params.push(FlatGrad { id: param.id, dtype, length, grad, device: value.device().inner() });
    }
}

struct Restore {
    values: HashMap<ParamId, Tensor<1>>,
    grads: GradientsParams,
}

impl ModuleVisitor for Restore {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(value) = self.values.remove(&param.id) {
            let placements = Placements::of(&param.val());
            let value = value.reshape(placements.local_shape(param.shape()));
            self.grads.register::<D>(param.id, placements.from_local(value));
        }
    }
}
