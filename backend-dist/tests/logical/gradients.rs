//! Gradients of every operation that has some, with inputs in any placement: those of backward operations too.

use crate::cpu;
use crate::operations::{Inputs, Operation, flat};
use crate::property::{Places, count, difference, index, operation, place, values};
use backend_dist::launch::launch;
use backend_dist::logical::Placement::{self, Partial, Replicate, Shard, Strided};
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::{LogicalDevice, LogicalOptions};
use burn::tensor::{DType, Device, Tensor, TensorData};

/// The loss, and the gradients of `x` and `y`, which are `placed` before the operation.
pub fn gradients(
    operation: &Operation,
    shape: [usize; 3],
    dim: usize,
    (device, dtype): (&Device, DType),
    placed: impl Fn(Inputs) -> Inputs,
) -> Vec<f64> {
    let leaf = |seed| {
        let data = TensorData::new(values(shape, seed), shape);
        Tensor::<3>::from_data(data, (device, dtype)).require_grad()
    };
    let (x, y) = (leaf(1), leaf(2));
    let out = operation.1(placed(Inputs { x: x.clone(), y: y.clone(), index: index(shape, device), dim }));
    let n = out.dims()[0];
    let weights: Vec<f64> = (0..n).map(|i| (i as f64 * 0.7 + 0.3).cos()).collect();
    let weights = Tensor::<1>::from_data(TensorData::new(weights, [n]), (device, dtype));
    // What does not depend on an input has a gradient too.
    let loss = (out * weights).sum() + x.clone().sum() + y.clone().sum();
    let grads = loss.backward();
    let read = |x: Tensor<1>| x.into_data().iter::<f64>().collect::<Vec<_>>();
    let [of_x, of_y] = [x, y].map(|leaf| read(flat(leaf.grad(&grads).unwrap())));
    [read(loss), of_x, of_y].concat()
}

fn check(at: usize, shape: [usize; 3], dim: usize, layout: &str, axes: &[Axis], places: &Places) {
    let operation = operation(at);
    let name = operation.0;
    let expected = gradients(operation, shape, dim, (&cpu().autodiff(), DType::F64), |inputs| inputs);
    let mesh = Mesh::new(layout.parse().unwrap()).unwrap();
    for fusion in [false, true] {
        let what = format!("{name} of {shape:?} along {dim} on {layout} with {places:?}, fusion {fusion}");
        let ranks = launch(&mesh, &[cpu()], |rank| {
            let options = LogicalOptions { fusion: Some(fusion), run_ahead: Some(fusion), ..Default::default() };
            let device = rank.logical_device_with(axes, options).autodiff();
            let placed = |inputs| place(inputs, shape, &rank, axes, places);
            Ok(gradients(operation, shape, dim, (&device, DType::F64), placed))
        });
        for values in ranks.unwrap_or_else(|error| panic!("{what}: {error}")) {
            let found = difference(&values, &expected);
            assert!(found <= 1e-10, "{what}: {found:e}");
        }
    }
}

#[test]
fn every_operation_has_the_gradients_of_one_device() {
    for at in 0..count() {
        for (dim, x, y) in [
            (0, Shard(0), Replicate),
            (1, Shard(1), Shard(1)),
            (2, Shard(2), Replicate),
            (1, Replicate, Shard(0)),
            (2, Partial, Shard(1)),
            (0, Replicate, Shard(2)),
            (2, Strided { dim: 2, blocks: 2 }, Replicate),
            (1, Strided { dim: 1, blocks: 2 }, Strided { dim: 1, blocks: 2 }),
        ] {
            check(at, [4, 4, 4], dim, "TP2", &[Axis::Tp], &vec![[x, y, Replicate]]);
        }
        let parts = Placement::in_parts(2, &[2, 1, 1]).unwrap();
        check(at, [2, 2, 8], 2, "TP2", &[Axis::Tp], &vec![[parts, Replicate, Replicate]]);
    }
}
