//! Patterns where fusion is on: in single precision, under autocast, and with random numbers.

use crate::cpu;
use crate::gradients::gradients;
use crate::operations::Operation;
use crate::patterns::{DRAWN, PATTERNS};
use crate::property::difference;
use backend_dist::launch::{Rank, launch};
use backend_dist::logical::Placement::{Replicate, Shard};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions, Redistribute, Teams, explain};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

const SHAPES: [[usize; 3]; 5] = [[4, 4, 4], [2, 6, 8], [1, 4, 4], [2, 1, 4], [1, 1, 4]];

fn options(fusion: bool, autocast: Option<FloatDType>) -> LogicalOptions {
    LogicalOptions { fusion: Some(fusion), autocast, ..Default::default() }
}

/// Loss and gradients on each rank; with `x` sharded along a dimension if that is said and possible.
fn ranks(
    pattern: &Operation,
    shape: [usize; 3],
    layout: &str,
    (options, dtype): (LogicalOptions, DType),
    sharded: Option<usize>,
) -> Vec<Vec<f64>> {
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    let ranks = launch(&mesh, &[cpu()], |rank| {
        let device = rank.logical_device_with(&[Axis::Tp], options).autodiff();
        device.seed(5);
        let sharded = sharded.filter(|dim| shape[*dim].is_multiple_of(rank.mesh.world_size()));
        Ok(gradients(pattern, shape, 0, (&device, dtype), |mut inputs| {
            if let Some(dim) = sharded {
                inputs.x = inputs.x.redistribute(&rank, Axis::Tp, Shard(dim));
            }
            inputs
        }))
    });
    ranks.unwrap_or_else(|error| panic!("{} of {shape:?} on {layout}, {options:?}: {error}", pattern.0))
}

/// Checks that a pattern gives what is `expected` of its shape, whole and sharded.
fn check(
    pattern: &Operation,
    how: (LogicalOptions, DType),
    bound: f64,
    expected: impl Fn(&Operation, [usize; 3]) -> Vec<f64>,
) {
    for shape in SHAPES {
        let expected = expected(pattern, shape);
        for (layout, sharded) in [("TP1", None), ("TP2", None), ("TP2", Some(0)), ("TP2", Some(1)), ("TP2", Some(2))] {
            for found in ranks(pattern, shape, layout, how, sharded) {
                let found = difference(&found, &expected);
                let what = format!("{} of {shape:?} on {layout}, sharded {sharded:?}, {how:?}", pattern.0);
                assert!(found <= bound, "{what}: {found:e}");
            }
        }
    }
}

#[test]
fn patterns_in_other_precisions() {
    let half = Some(FloatDType::BF16);
    for pattern in PATTERNS {
        let expected =
            |pattern: &Operation, shape| gradients(pattern, shape, 0, (&cpu().autodiff(), DType::F64), |inputs| inputs);
        check(pattern, (options(true, None), DType::F32), 1e-4, expected);
        check(pattern, (options(true, half), DType::F32), 0.2, expected);
    }
}

/// One device of Burn draws other numbers.
#[test]
fn draws_where_they_are_used_are_those_in_memory() {
    for pattern in DRAWN {
        let how = (options(false, None), DType::F64);
        check(pattern, (options(true, None), DType::F64), 1e-10, |pattern, shape| {
            ranks(pattern, shape, "TP1", how, None).swap_remove(0)
        });
    }
}

/// What follows from a constant that one rank has read is stored there as on the others: also where it reads for all.
#[test]
fn a_rank_that_reads_a_constant_has_the_collectives_of_the_others() {
    let how = options(true, Some(FloatDType::BF16));
    let mesh = Mesh::new("TP2".parse().unwrap()).unwrap();
    let program = |rank: &Rank, device: Device| {
        let [x, weight, half] = [0.7, 0.3, 0.5].map(|x| Tensor::<3>::full([4, 4, 4], x, (&device, DType::F32)));
        if rank.rank == 0 {
            assert!(half.clone().into_data().iter::<f64>().all(|x| x == 0.5));
        }
        let columns = (x + 0.1).matmul(weight.redistribute(rank, Axis::Tp, Shard(2))) * half;
        let whole = columns.redistribute(rank, Axis::Tp, Replicate);
        Ok(whole.into_data().iter::<f64>().collect::<Vec<_>>())
    };
    let alike = launch(&mesh, &[cpu()], |rank| program(&rank, rank.logical_device_with(&[Axis::Tp], how)));
    let teams = Teams::new(&mesh, Axis::Tp).options(how);
    let led = launch(&mesh, &[cpu()], |rank| teams.run(&rank, |device| program(&rank, device)));
    for value in alike.unwrap().into_iter().chain(led.unwrap().into_iter().flatten()).flatten() {
        assert!((value - 0.48).abs() < 1e-2, "{value}");
    }
}

#[test]
fn a_sum_of_matrices_without_columns_has_no_elements() {
    let ranks = launch(&Mesh::new("TP2".parse().unwrap()).unwrap(), &[cpu()], |rank| {
        let device = rank.logical_device_with(&[Axis::Tp], options(true, None));
        let [x, y] = [[2, 3, 4], [2, 4, 0]].map(|shape| Tensor::<3>::ones(shape, (&device, DType::F64)));
        Ok(x.matmul(y).sum_dim(0).into_data())
    });
    for sum in ranks.unwrap() {
        assert_eq!(sum.shape().to_vec(), [1, 3, 0]);
    }
}

/// However many there are, in rows of whatever length; but for primes without Burn's own kernels.
#[test]
fn all_elements_are_summed_row_by_row() {
    for (shape, is_prime) in [
        ([1, 1], false),
        ([3, 100], false),
        ([2, 50_000], false),
        ([30_000, 2], false),
        ([16_400, 3], false),
        ([1, 65_537], true),
        ([2, 65_537], true),
    ] {
        let values: Vec<f64> = (0..shape[0] * shape[1]).map(|i| (i as f64 * 0.37).sin() + 0.3).collect();
        let total: f64 = values.iter().sum();
        let ranks = launch(&Mesh::new("TP1".parse().unwrap()).unwrap(), &[cpu()], |rank| {
            let device = rank.logical_device_with(&[Axis::Tp], options(true, None));
            let x = Tensor::<2>::from_data(TensorData::new(values.clone(), shape), (&device, DType::F64));
            let found = [x.clone().sum(), x.clone().mean(), (x.clone() * 2.0).sum(), (x * 2.0).mean()];
            let found = found.map(|x| x.into_scalar::<f64>());
            Ok((found, explain(&device).kernels))
        });
        let (found, kernels) = ranks.unwrap().remove(0);
        let mean = total / values.len() as f64;
        for (found, expected) in found.into_iter().zip([total, mean, 2.0 * total, 2.0 * mean]) {
            assert!((found - expected).abs() <= 1e-12 * total.abs(), "{shape:?}: {found} is not {expected}");
        }
        let alone = kernels.contains_key("arithmetic alone");
        assert!(alone == is_prime && !kernels.contains_key("sum of rows"), "{shape:?}: {kernels:?}");
    }
}
