//! Every operation, with inputs in any placement, on 1 to 4 ranks.

use crate::cpu;
use crate::layers::LAYERS;
use crate::operations::{Inputs, OPERATIONS, Operation};
use crate::patterns::PATTERNS;
use crate::rarer::RARER;
use backend_dist::launch::{Rank, launch};
use backend_dist::logical::Placement::{self, Partial, Parts, Replicate, Shard, Strided, Varying};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use proptest::prelude::*;

/// The operation of this number.
pub fn operation(at: usize) -> &'static Operation {
    OPERATIONS.iter().chain(RARER).chain(LAYERS).chain(PATTERNS).nth(at).unwrap()
}

/// Number of operations.
pub fn count() -> usize {
    OPERATIONS.len() + RARER.len() + LAYERS.len() + PATTERNS.len()
}

pub fn values(shape: [usize; 3], seed: usize) -> Vec<f64> {
    (0..shape.iter().product::<usize>()).map(|i| ((i * 7 + seed * 13) as f64 * 0.37).sin()).collect()
}

fn float(shape: [usize; 3], seed: usize, device: &Device) -> Tensor<3> {
    Tensor::from_data(TensorData::new(values(shape, seed), shape), (device, DType::F64))
}

/// Values below every dimension.
pub fn index(shape: [usize; 3], device: &Device) -> Tensor<3, Int> {
    let below = shape.iter().min().unwrap();
    let n: usize = shape.iter().product();
    let values: Vec<i64> = (0..n).map(|i| ((i * 5 + 2) % below) as i64).collect();
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// The tensor in a placement; where the ranks do not divide it, whole.
fn placed(x: Tensor<3>, rank: &Rank, axis: Axis, at: Placement) -> Tensor<3> {
    let n = rank.mesh.axis_size(axis);
    match at {
        Replicate => x,
        Shard(dim) if x.dims()[dim].is_multiple_of(n) => x.redistribute(rank, axis, Shard(dim)),
        Strided { .. } | Parts { .. } if at.local_shape(&x.dims(), n).is_some() => x.redistribute(rank, axis, at),
        Shard(_) | Strided { .. } | Parts { .. } | Varying => x,
        Partial => {
            let summand = x.clone() / n as f64;
            let summands = Tensor::cat(vec![summand.unsqueeze::<4>(); n], 0).redistribute(rank, axis, Shard(0));
            let sum = summands.sum_dim(0).squeeze_dim::<3>(0);
            // On one rank everything is whole.
            assert_eq!(sum.placement(axis), if n == 1 { Replicate } else { Partial });
            sum
        }
    }
}

fn placed_int(x: Tensor<3, Int>, rank: &Rank, axis: Axis, at: Placement) -> Tensor<3, Int> {
    match at {
        Shard(dim) if x.dims()[dim].is_multiple_of(rank.mesh.axis_size(axis)) => x.redistribute(rank, axis, Shard(dim)),
        Strided { .. } | Parts { .. } if at.local_shape(&x.dims(), rank.mesh.axis_size(axis)).is_some() => {
            x.redistribute(rank, axis, at)
        }
        _ => x,
    }
}

fn read(x: Tensor<1>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// Placements of x, y and the index along every axis.
pub type Places = Vec<[Placement; 3]>;

fn check(operation: usize, shape: [usize; 3], dim: usize, layout: &str, axes: &[Axis], places: &Places) {
    for fusion in [false, true] {
        let options = LogicalOptions { fusion: Some(fusion), run_ahead: Some(fusion), ..Default::default() };
        check_with(options, operation, shape, dim, (layout, axes, places));
    }
}

/// The inputs of this shape where they are to be.
pub fn place(mut inputs: Inputs, shape: [usize; 3], rank: &Rank, axes: &[Axis], places: &Places) -> Inputs {
    // What two axes shard alike, the first has divided.
    let fits = |at: &Placement| match at {
        Partial | Replicate | Varying => true,
        at => at.local_shape(&shape, rank.mesh.world_size()).is_some(),
    };
    for (&axis, [x, y, index]) in axes.iter().zip(places) {
        if fits(x) {
            inputs.x = placed(inputs.x, rank, axis, *x);
        }
        if fits(y) {
            inputs.y = placed(inputs.y, rank, axis, *y);
        }
        if fits(index) {
            inputs.index = placed_int(inputs.index, rank, axis, *index);
        }
    }
    inputs
}

/// The norm of the difference, by that of what is expected.
pub fn difference(values: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(values.len(), expected.len());
    let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
    values.iter().zip(expected).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt() / norm.max(1e-3)
}

fn check_with(
    options: LogicalOptions,
    operation: usize,
    shape: [usize; 3],
    dim: usize,
    (layout, axes, places): (&str, &[Axis], &Places),
) {
    let (name, run) = *self::operation(operation);
    let inputs = |device: &Device| Inputs {
        x: float(shape, 1, device),
        y: float(shape, 2, device),
        index: index(shape, device),
        dim,
    };
    let expected = read(run(inputs(&cpu())));
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let ranks = launch(&mesh, &[cpu()], |rank| {
        let inputs = place(inputs(&rank.logical_device_with(axes, options)), shape, &rank, axes, places);
        // What an operation leaves to others, again as it was planned the first time, and what it consumes.
        let [again, last] = [inputs.clone(), inputs.clone()];
        Ok([read(run(inputs)), read(run(again)), read(run(last))])
    });
    for (rank, values) in ranks.unwrap().iter().flatten().enumerate() {
        let found = difference(values, &expected);
        assert!(
            found <= 1e-10,
            "{name} of {shape:?} along {dim} on {layout} with {places:?}, {options:?}, result {rank}: {found:e}"
        );
    }
}

fn placement() -> impl Strategy<Value = Placement> {
    let in_parts = |sizes: &'static [usize]| (0usize..3).prop_map(|dim| Placement::in_parts(dim, sizes).unwrap());
    prop_oneof![
        2 => Just(Replicate),
        2 => (0usize..3).prop_map(Shard),
        2 => Just(Partial),
        1 => in_parts(&[1, 1]),
        1 => in_parts(&[2, 1, 1])
    ]
}

fn places(axes: usize) -> impl Strategy<Value = Places> {
    proptest::collection::vec([placement(), placement(), placement()], axes)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn an_operation_on_one_axis_equals_one_device(
        operation in 0..count(),
        a in 1usize..9,
        b in 1usize..9,
        c in 1usize..5,
        dim in 0usize..3,
        ranks in 1usize..5,
        places in places(1),
    ) {
        check(operation, [a, b, 2 * c], dim, &format!("TP{ranks}"), &[Axis::Tp], &places);
    }

    #[test]
    fn an_operation_on_two_axes_equals_one_device(
        operation in 0..count(),
        a in 1usize..5,
        b in 1usize..5,
        c in 1usize..5,
        dim in 0usize..3,
        places in places(2),
    ) {
        check(operation, [2 * a, 2 * b, 2 * c], dim, "TP2 DP2", &[Axis::Dp, Axis::Tp], &places);
    }
}

/// A whole copy that one view has made, and the last view consumes.
#[test]
fn a_consumed_copy_has_no_views() {
    let reshape = OPERATIONS.iter().position(|(name, _)| *name == "reduced after a merge").unwrap();
    for operation in 0..count() {
        check(operation, [1, 2, 4], 0, "TP4", &[Axis::Tp], &vec![[Replicate, Shard(2), Replicate]]);
    }
    check(reshape, [1, 2, 4], 0, "TP4", &[Axis::Tp], &vec![[Shard(2), Shard(2), Replicate]]);
}

/// Shapes that divide, so that every rule is met in every placement.
#[test]
fn every_operation_in_every_placement_of_its_first_input() {
    for operation in 0..count() {
        let strided = [1, 2].map(|dim| Strided { dim, blocks: 2 });
        for at in [Replicate, Shard(0), Shard(1), Shard(2), Partial].into_iter().chain(strided) {
            for other in [Replicate, at] {
                for dim in 0..3 {
                    check(operation, [4, 4, 4], dim, "TP2", &[Axis::Tp], &vec![[at, other, other]]);
                }
            }
        }
    }
}

/// Of eight elements, two ranks have two, one and one each.
#[test]
fn every_operation_of_an_input_in_parts() {
    for operation in 0..count() {
        for at in [0, 1, 2].map(|dim| Placement::in_parts(dim, &[2, 1, 1]).unwrap()) {
            let mut shape = [2, 2, 2];
            shape[at.dim().unwrap()] = 8;
            for dim in 0..3 {
                check(operation, shape, dim, "TP2", &[Axis::Tp], &vec![[at, at, at]]);
            }
        }
    }
}

/// The mean over a dimension that one axis shards is a scaled sum, of a tensor that the other axis shards too.
#[test]
fn a_mean_over_a_sharded_dimension_is_scaled_as_the_rank_holds_it() {
    let operation = OPERATIONS.iter().position(|(name, _)| *name == "mean along").unwrap();
    let places = vec![[Shard(1), Replicate, Replicate], [Shard(2), Replicate, Replicate]];
    check(operation, [2, 4, 4], 1, "TP2 DP2", &[Axis::Dp, Axis::Tp], &places);
}

/// A softmax over one key is one, also where what it is multiplied by has more columns.
#[test]
fn a_softmax_over_one_key_remains_one() {
    let pattern = PATTERNS.iter().position(|(name, _)| *name == "values of all samples").unwrap();
    let operation = count() - PATTERNS.len() + pattern;
    check(operation, [1, 1, 4], 0, "TP3", &[Axis::Tp], &vec![[Partial, Replicate, Replicate]]);
}
