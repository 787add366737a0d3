//! Gradients of a module on a logical device, where its parameters are.

use std::collections::HashMap;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use super::flat::{dtypes, part, shaped};
use crate::local::{Placements, to_local};
use ranks::collective::all_reduce;
use ranks::comm::{Group, ReduceOp};

/// Brings each gradient of `module` to where its parameter is on the logical device along the axis of `group`; those
/// that are sums over the group, of parameters that every rank holds, in one all-reduce per number type. On other
/// devices nothing. Every rank of `group` must call it, with a clone of one module and gradients of the same parameters.
pub fn place_gradients<M: Module>(module: &M, grads: GradientsParams, group: &Group) -> GradientsParams {
    place_gradients_of(module, grads, group, |_| true)
}

/// [`place_gradients`] of the parameters `of`, which must be the same on every rank; the gradients of the others stay where
/// they are.
pub fn place_gradients_of<M: Module>(
    module: &M,
    grads: GradientsParams,
    group: &Group,
    of: impl Fn(ParamId) -> bool,
) -> GradientsParams {
    let mut placed = Placed { grads, sums: GradientsParams::new(), of: &of };
    module.visit(&mut placed);
    let Placed { grads, sums, .. } = placed;
    let mut flat = Flat { grads: sums, sums: Vec::new() };
    module.visit(&mut flat);
    let sums = flat.sums;
    let mut values = HashMap::new();
    for dtype in dtypes(sums.iter().map(|sum| sum.dtype)) {
        let members: Vec<&Sum> = sums.iter().filter(|sum| sum.dtype == dtype).collect();
        let bucket = Tensor::cat(members.iter().map(|sum| sum.summand.clone()).collect(), 0);
        let total = all_reduce(bucket, ReduceOp::Sum, group);
        let mut start = 0;
        for sum in members {
            values.insert(sum.id, part(&total, start, sum.length));
            start += sum.length;
        }
    }
    let mut restore = Restore { grads, values };
    module.visit(&mut restore);
    restore.grads
}

/// This rank's part of a gradient, flat.
struct Sum {
    id: ParamId,
    dtype: DType,
    length: usize,
    summand: Tensor<1>,
}

/// Asks where tensors are before it makes others: the device would have to catch up for each answer.
struct Placed<'a> {
    grads: GradientsParams,
    /// What this rank holds of those that are sums over the group.
    sums: GradientsParams,
    of: &'a dyn Fn(ParamId) -> bool,
}

impl ModuleVisitor for Placed<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !(self.of)(param.id) {
            return;
        }
        let Some(grad) = self.grads.remove::<D>(param.id) else { return };
        let (wanted, here) = (Placements::of(&param.base()), Placements::of(&grad));
        if wanted.is_sum_of(&here) {
            self.sums.register::<D>(param.id, to_local(grad));
        } else {
            self.grads.register::<D>(param.id, wanted.moved(grad));
        }
    }
}

struct Flat {
    grads: GradientsParams,
    sums: Vec<Sum>,
}

impl ModuleVisitor for Flat {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(summand) = self.grads.remove::<D>(param.id) else { return };
        let (dtype, length) = (summand.dtype(), summand.shape().num_elements());
        self.sums.push(Sum { id: param.id, dtype, length, summand: summand.reshape([length]) });
    }
}

struct Restore {
    grads: GradientsParams,
    values: HashMap<ParamId, Tensor<1>>,
}

impl ModuleVisitor for Restore {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(value) = self.values.remove(&param.id) {
            let value = shaped(value, param.shape());
            self.grads.register::<D>(param.id, Placements::of(&param.base()).from_local(value));
        }
    }
}
