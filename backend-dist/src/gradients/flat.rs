//! The gradients of a module as flat tensors in the order in which the module visits its parameters.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Shape, Tensor};

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

    /// Whether this rank used the parameter.
    pub(super) fn is_used(&self) -> bool {
        self.grad.is_some()
    }

    /// Adds to the gradient.
    pub(super) fn add(&mut self, grad: Tensor<1>) {
        self.grad = Some(match self.grad.take() {
            Some(earlier) => earlier + grad,
            None => grad,
        });
    }

    /// [`value`](Self::value), of which nothing stays here.
    pub(super) fn take(&mut self) -> Tensor<1> {
        let value = self.value();
        self.grad = None;
        value
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
    let params = take(module, grads, of);
    let used = used_anywhere(params.iter().map(FlatGrad::is_used).collect(), group);
    params.into_iter().zip(used).filter_map(|(param, used)| used.then_some(param)).collect()
}

/// Takes the gradients of the parameters `of` out of `grads`, in visiting order.
pub(super) fn take<M: Module>(module: &M, grads: &mut GradientsParams, of: impl Fn(ParamId) -> bool) -> Vec<FlatGrad> {
    let mut local = Flatten { grads, of: &of, seen: HashSet::new(), params: Vec::new() };
    module.visit(&mut local);
    local.params
}

/// Which parameters some rank of `group` used, of those that each rank did.
pub(super) fn used_anywhere(here: Vec<bool>, group: &Group) -> Vec<bool> {
    let params = here.len();
    let ranks = group.all_gather_host(here);
    (0..params).map(|index| ranks.iter().any(|rank| rank[index])).collect()
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
            (param.id, part(bucket, start - param.length, param.length))
        })
        .collect()
}

/// `length` elements of a flat tensor; `narrow` refuses none, which a parameter such as `[0, 4]` has.
pub fn part(flat: &Tensor<1>, start: usize, length: usize) -> Tensor<1> {
    flat.clone().slice(start..start + length)
}

/// Adds flat values to `grads` in the shapes of the module's parameters.
pub fn put_back<M: Module>(module: &M, values: HashMap<ParamId, Tensor<1>>, grads: GradientsParams) -> GradientsParams {
    let mut restore = Restore { values, grads };
    module.visit(&mut restore);
    restore.grads
}

/// The tensor in another shape; a reshape to its own would be an operation all the same.
pub(super) fn shaped<const A: usize, const B: usize>(x: Tensor<A>, shape: Shape) -> Tensor<B> {
    if x.shape() == shape { Tensor::from_dispatch(x.into_dispatch()) } else { x.reshape(shape) }
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
        let placements = Placements::of(&value);
        let length = placements.local_shape(value.shape()).num_elements();
        // What a rank has of a sum over the ranks of a logical device is no gradient yet.
        let here = |grad| shaped(to_local(placements.moved(grad)), [length].into());
        let grad = self.grads.remove::<D>(param.id).map(here);
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
            let value = shaped(value, placements.local_shape(param.shape()));
            self.grads.register::<D>(param.id, placements.from_local(value));
        }
    }
}
