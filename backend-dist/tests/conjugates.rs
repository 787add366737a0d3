//! Each conjugate pair: its forward, and that its backward is the adjoint.

use backend_dist::comm::Group;
use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use backend_dist::ops::tensor_parallel::*;
use burn::tensor::{DType, Device, Tensor, TensorData};

/// Runs `op` on `x_r = [rows, 2]` with upstream gradient `d_r`, both different on every rank; output and gradient of
/// `x`.
fn both(rows: usize, op: impl Fn(Tensor<2>, &Group) -> Tensor<2> + Sync) -> Vec<(Vec<f64>, Vec<f64>)> {
    let mesh = Mesh::new(ParallelLayout { tp: 2, ..Default::default() }).unwrap();
    launch(&mesh, &[Device::flex()], |r| {
        let device = r.device.clone().autodiff();
        let fill = |n: [usize; 2], base: f64| {
            let values: Vec<f64> = (0..n[0] * n[1]).map(|i| base + i as f64).collect();
            Tensor::<2>::from_data(TensorData::new(values, n), (&device, DType::F64))
        };
        let x = fill([rows, 2], 10.0 * r.rank as f64).require_grad();
        let out = op(x.clone(), &r.group(Axis::Tp));
        let upstream = fill(out.dims(), 100.0 + 100.0 * r.rank as f64);
        let grads = (out.clone() * upstream).sum().backward();
        let grad = x.grad(&grads).unwrap();
        Ok((out.into_data().iter().collect(), grad.into_data().iter().collect()))
    })
    .unwrap()
}

#[test]
fn copy_and_reduce() {
    let copy = both(1, copy_to_tensor_parallel);
    assert_eq!(copy, [(vec![0.0, 1.0], vec![300.0, 302.0]), (vec![10.0, 11.0], vec![300.0, 302.0])]);
    let reduce = both(1, |x, g| reduce_from_tensor_parallel(Partial::new(x), g));
    assert_eq!(reduce, [(vec![10.0, 12.0], vec![100.0, 101.0]), (vec![10.0, 12.0], vec![200.0, 201.0])]);
}

#[test]
fn sequence_gather_and_reduce_scatter() {
    let gather = both(1, gather_from_sequence_parallel);
    assert_eq!(gather[0], (vec![0.0, 1.0, 10.0, 11.0], vec![300.0, 302.0]));
    assert_eq!(gather[1], (vec![0.0, 1.0, 10.0, 11.0], vec![304.0, 306.0]));
    let scatter = both(2, |x, g| reduce_scatter_to_sequence_parallel(Partial::new(x), g));
    assert_eq!(scatter[0], (vec![10.0, 12.0], vec![100.0, 101.0, 200.0, 201.0]));
    assert_eq!(scatter[1], (vec![14.0, 16.0], vec![100.0, 101.0, 200.0, 201.0]));
}

#[test]
fn gathers_and_scatters_of_replicated_tensors() {
    let scatter = both(2, scatter_to_sequence_parallel);
    assert_eq!(scatter[1], (vec![12.0, 13.0], vec![100.0, 101.0, 200.0, 201.0]));
    let gather = both(1, gather_from_sequence_parallel_replicated);
    assert_eq!(gather[1], (vec![0.0, 1.0, 10.0, 11.0], vec![202.0, 203.0]));
    let columns = both(1, gather_from_tensor_parallel);
    assert_eq!(columns[1], (vec![0.0, 1.0, 10.0, 11.0], vec![202.0, 203.0]));
}

#[test]
fn a_collective_inside_a_model_without_gradient_is_refused() {
    let mesh = Mesh::new(ParallelLayout { tp: 2, ..Default::default() }).unwrap();
    let error = launch(&mesh, &[Device::flex()], |r| {
        let x = Tensor::<1>::zeros([2], &r.device.clone().autodiff()).require_grad();
        backend_dist::collective::all_gather(x, 0, &r.group(Axis::Tp));
        Ok(())
    })
    .unwrap_err();
    assert!(error.to_string().contains("has no gradient"), "{error}");
}
