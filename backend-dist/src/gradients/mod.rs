//! Gradients of a Burn module over the ranks of a group: their mean in one all-reduce per number type, and flat values in
//! an order that all ranks share.

mod clip;
mod flat;
pub mod overlapped;
mod placed;

use std::collections::HashMap;

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

pub use clip::clip_grad_norm;
pub use flat::{FlatGrad, dtypes, part, put_back, split, take_used};
pub use placed::{place_gradients, place_gradients_of};
use ranks::collective::all_reduce;
use ranks::comm::{Group, ReduceOp};

/// Replaces every gradient by its mean over `group`.
///
/// All ranks of `group` must call it, with clones of one module: parameters pair up by the order in which the module visits
/// them. A parameter that only some ranks used counts as zero on the others, one that no rank used keeps having no gradient.
pub fn average_gradients<M: Module>(module: &M, grads: GradientsParams, group: &Group) -> GradientsParams {
    average_gradients_of(module, grads, group, |_| true)
}

/// [`average_gradients`] of the parameters `of`, which must be the same on every rank; the gradients of the others stay as
/// they are.
pub fn average_gradients_of<M: Module>(
    module: &M,
    mut grads: GradientsParams,
    group: &Group,
    of: impl Fn(ParamId) -> bool,
) -> GradientsParams {
    if group.size() == 1 {
        return grads;
    }
    let params = take_used(module, &mut grads, group, of);
    let mut averaged = HashMap::new();
    for dtype in dtypes(params.iter().map(|param| param.dtype)) {
        let members: Vec<&FlatGrad> = params.iter().filter(|param| param.dtype == dtype).collect();
        let bucket = Tensor::cat(members.iter().map(|param| param.value()).collect(), 0);
        let mean = all_reduce(bucket, ReduceOp::Sum, group).div_scalar(group.size() as f64);
        averaged.extend(split(&mean, &members));
    }
    put_back(module, averaged, grads)
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::tensor::Device;
    use ranks::launch::launch;
    use ranks::mesh::{Axis, Mesh, ParallelLayout};

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
        let models = parking_lot::Mutex::new(vec![model.clone().fork(&device), model.clone().fork(&device)]);
        let layout = ParallelLayout { dp: 2, ..Default::default() };
        let results = launch(&Mesh::new(layout).unwrap(), &[Device::flex()], |rank| {
            let model = models.lock().pop().unwrap();
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
