//! The mean of the gradients, only where it is needed.

use std::collections::HashMap;

use backend_dist::collective::all_to_all;
use backend_dist::comm::Group;
use backend_dist::gradients::{FlatGrad, dtypes, part, put_back, split, take_used};
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};

use super::Owners;

/// The means over `group` of the gradients that this rank owns.
///
/// Equal, bit for bit on CPU ranks, to what [`average_gradients`] gives, for the owned parameters; the others have no
/// gradient in the result. A parameter that only some ranks used counts as zero on the others. Panics if a parameter
/// has a gradient although it does not require one.
///
/// [`average_gradients`]: backend_dist::gradients::average_gradients
pub(in crate::learner) fn reduce_to_owners<M: Module>(
    module: &M,
    grads: GradientsParams,
    owners: &Owners,
    group: &Group,
) -> GradientsParams {
    reduce_some_to_owners(module, grads, |_| true, owners, group)
}

/// [`reduce_to_owners`] for the parameters `of`; the gradients of the others stay as they are.
pub(in crate::learner) fn reduce_some_to_owners<M: Module>(
    module: &M,
    mut grads: GradientsParams,
    of: impl Fn(ParamId) -> bool,
    owners: &Owners,
    group: &Group,
) -> GradientsParams {
    if group.size() == 1 {
        return grads;
    }
    let owner = |param: &FlatGrad| {
        owners.owner(param.id).unwrap_or_else(|| {
            panic!("parameter {} has a gradient but does not require one, so no rank keeps its state", param.id)
        })
    };
    let params = take_used(module, &mut grads, group, of);
    let mut means = HashMap::new();
    for dtype in dtypes(params.iter().map(|param| param.dtype)) {
        let mut members: Vec<&FlatGrad> = params.iter().filter(|param| param.dtype == dtype).collect();
        // A stable sort: the parameters of one owner stay in visiting order.
        members.sort_by_key(|param| owner(param));
        let mut splits = vec![0; owners.ranks()];
        for param in &members {
            splits[owner(param)] += param.length;
        }
        let own = splits[group.rank()];
        let bucket = Tensor::cat(members.iter().map(|param| param.value()).collect(), 0);
        let received = all_to_all(bucket, &splits, &vec![own; group.size()], group);
        if own > 0 {
            let mean = sum_in_order(received, group.size(), own, dtype).div_scalar(group.size() as f64);
            members.retain(|param| owner(param) == group.rank());
            means.extend(split(&mean, &members));
        }
    }
    put_back(module, means, grads)
}

/// The sum of `parts` runs of `length` elements, first to last, as the in-process all-reduce adds: 16-bit floats in
/// f32, rounded once.
fn sum_in_order(runs: Tensor<1>, parts: usize, length: usize, dtype: DType) -> Tensor<1> {
    let narrow = matches!(dtype, DType::F16 | DType::BF16);
    let summand = |index: usize| {
        let summand = part(&runs, index * length, length);
        if narrow { summand.cast(FloatDType::F32) } else { summand }
    };
    let sum = (1..parts).fold(summand(0), |sum, index| sum + summand(index));
    if narrow { sum.cast(FloatDType::from(dtype)) } else { sum }
}

#[cfg(test)]
mod tests {
    use backend_dist::collective::all_reduce;
    use backend_dist::comm::ReduceOp;
    use backend_dist::launch::launch;
    use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
    use burn::tensor::Device;

    use super::*;

    #[test]
    fn the_sum_has_the_bits_of_the_all_reduce_in_every_float_type() {
        let layout = ParallelLayout { dp: 3, ..Default::default() };
        for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
            let results = launch(&Mesh::new(layout.clone()).unwrap(), &[Device::flex()], |rank| {
                let group = rank.group(Axis::Dp);
                let values: Vec<f64> = (0..6).map(|i| ((i * 3 + rank.rank) as f64 * 1.7).sin() * 10.0).collect();
                let values = Tensor::<1>::from_data(values.as_slice(), (&Device::flex(), dtype));
                let own = [1, 3, 2][group.rank()];
                let start = [0, 1, 4][group.rank()];
                let expected = all_reduce(values.clone(), ReduceOp::Sum, &group).narrow(0, start, own);
                let received = all_to_all(values, &[1, 3, 2], &[own; 3], &group);
                Ok((sum_in_order(received, 3, own, dtype).into_data(), expected.into_data()))
            });
            for (sum, expected) in results.unwrap() {
                assert_eq!(sum, expected, "{dtype:?}");
            }
        }
    }
}
