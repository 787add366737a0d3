//! Averages the gradients of a module over the ranks of a group, in one exchange per number type.

use std::collections::{HashMap, HashSet};

use backend_dist::collective::all_reduce;
use backend_dist::comm::{Group, ReduceOp};
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

/// Replaces every gradient by its mean over `group`.
///
/// All ranks must hold clones of one module: parameters pair up by the order in which the module visits them. A
/// parameter that only some ranks used counts as zero on the others, one that no rank used keeps having no gradient.
pub(super) fn average_gradients<M: Module>(module: &M, mut grads: GradientsParams, group: &Group) -> GradientsParams {
    if group.size() == 1 {
        return grads;
    }
    let mut local = Flatten { grads: &mut grads, seen: HashSet::new(), params: Vec::new() };
    module.visit(&mut local);
    let mut params = local.params;
    let used = used_anywhere(&params, group);
    params = params.into_iter().zip(used).filter_map(|(param, used)| used.then_some(param)).collect();

    let mut averaged = HashMap::new();
    for dtype in dtypes(&params) {
        let members: Vec<&FlatGrad> = params.iter().filter(|param| param.dtype == dtype).collect();
        let bucket = Tensor::cat(members.iter().map(|param| param.value()).collect(), 0);
        let mean = all_reduce(bucket, ReduceOp::Sum, group).div_scalar(group.size() as f64);
        let mut start = 0;
        for param in members {
            averaged.insert(param.id, mean.clone().narrow(0, start, param.length));
            start += param.length;
        }
    }
    let mut restore = Restore { averaged, grads };
    module.visit(&mut restore);
    restore.grads
}

/// One parameter's gradient on this rank, flat.
struct FlatGrad {
    id: ParamId,
    dtype: DType,
    length: usize,
    /// `None` when the step did not use the parameter.
    grad: Option<Tensor<1>>,
    device: burn::tensor::Device,
}

impl FlatGrad {
    fn value(&self) -> Tensor<1> {
        self.grad.clone().unwrap_or_else(|| Tensor::zeros([self.length], (&self.device, self.dtype)))
    }
}

fn used_anywhere(params: &[FlatGrad], group: &Group) -> Vec<bool> {
    let here: Vec<bool> = params.iter().map(|param| param.grad.is_some()).collect();
    let ranks = group.all_gather_host(here);
    (0..params.len()).map(|index| ranks.iter().any(|rank| rank[index])).collect()
}

/// The number types in order of first use, the same on every rank.
fn dtypes(params: &[FlatGrad]) -> Vec<DType> {
    let mut dtypes = Vec::new();
    for param in params {
        if !dtypes.contains(&param.dtype) {
            dtypes.push(param.dtype);
        }
    }
    dtypes
}

struct Flatten<'a> {
    grads: &'a mut GradientsParams,
    /// A module may hold one parameter in two places; its gradient is one.
    seen: HashSet<ParamId>,
    params: Vec<FlatGrad>,
}

impl ModuleVisitor for Flatten<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let value = param.val();
        let length = value.shape().num_elements();
        let grad = self.grads.remove::<D>(param.id).map(|grad| grad.reshape([length]));
        let dtype = grad.as_ref().map_or(value.dtype(), Tensor::dtype);
        self.params.push(FlatGrad { id: param.id, dtype, length, grad, device: value.device().inner() });
    }
}

struct Restore {
    averaged: HashMap<ParamId, Tensor<1>>,
    grads: GradientsParams,
}

impl ModuleVisitor for Restore {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(mean) = self.averaged.remove(&param.id) {
            self.grads.register::<D>(param.id, mean.reshape(param.shape()));
        }
    }
}

#[cfg(test)]
mod tests {
    use backend_dist::launch::launch;
    use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;

    use super::*;

    #[derive(Module, Debug)]
    struct Three {
        always: Linear,
        sometimes: Linear,
        never: Linear,
    }

    #[test]
    fn the_mean_counts_an_unused_parameter_as_zero_and_leaves_one_unused_everywhere_alone() {
        let device = Device::flex().autodiff();
        let linear = || LinearConfig::new(2, 3).with_bias(false).init(&device);
        let model = Three { always: linear(), sometimes: linear(), never: linear() };
        let models = std::sync::Mutex::new(vec![model.clone().fork(&device), model.clone().fork(&device)]);
        let layout = ParallelLayout { dp: 2, ..Default::default() };
        let results = launch(&Mesh::new(layout).unwrap(), &[Device::flex()], |rank| {
            let model = models.lock().unwrap().pop().unwrap();
            let device = Device::flex().autodiff();
            let x = Tensor::<2>::ones([1, 2], &device) * (rank.rank as f64 + 1.0);
            let mut loss = model.always.forward(x.clone()).sum();
            if rank.rank == 1 {
                loss = loss + model.sometimes.forward(x).sum();
            }
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let mut grads = average_gradients(&model, grads, &rank.group(Axis::Dp));
            let mut take = |linear: &Linear| grads.remove::<2>(linear.weight.id).map(|grad| grad.into_data());
            Ok([take(&model.always), take(&model.sometimes), take(&model.never)])
        })
        .unwrap();
        for [always, sometimes, never] in results {
            assert_eq!(always.unwrap().try_to_vec::<f32>().unwrap(), [1.5; 6]);
            assert_eq!(sometimes.unwrap().try_to_vec::<f32>().unwrap(), [1.0; 6]);
            assert!(never.is_none());
        }
    }
}
