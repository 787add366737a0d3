//! Every collective in every type: GPU ranks get the same results as CPU ranks.

use super::halves;
use crate::numbers::host;
use crate::ranks::{mesh, on_gpus};
use crate::report::Report;
use backend_dist::collective::*;
use backend_dist::comm::ReduceOp;
use backend_dist::launch::{Rank, launch};
use backend_dist::mesh::Axis;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

type Values = Vec<(String, Vec<f64>)>;

pub fn check(gpus: usize, report: &mut Report) {
    let expected =
        launch(&mesh(&halves(gpus)), &[Device::flex()], |rank| Ok(collectives(&rank))).expect("CPU ranks do not fail");
    let found = on_gpus(&halves(gpus), |rank| Ok((rank.rank, collectives(rank))));
    let Some(found) = report.attempt("collectives", found) else { return };
    for (i, (name, _)) in expected[0].iter().enumerate() {
        let wrong = found.iter().find(|(rank, found)| found[i] != expected[*rank][i]);
        let text =
            |rank: usize, found: &Values| format!("rank {rank}: {:?} instead of {:?}", found[i].1, expected[rank][i].1);
        report.outcome(name, wrong.map_or(Ok(()), |(rank, found)| Err(text(*rank, found))));
    }
}

fn collectives(rank: &Rank) -> Values {
    let mut out = Values::new();
    let (tp, dp) = (rank.group(Axis::Tp), rank.group(Axis::Dp));
    let size = tp.size();
    for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
        // No waits between two of them: each must see the result of the previous one.
        let x = ramp([2 * size, 4 * size], rank, dtype);
        let mut add = |name: &str, y: Tensor<2>| out.push((format!("{name} {dtype:?}"), host(y)));
        add("all-reduce sum", all_reduce(x.clone(), ReduceOp::Sum, &tp));
        add("all-reduce max", all_reduce(x.clone(), ReduceOp::Max, &tp));
        add("all-reduce min", all_reduce(x.clone(), ReduceOp::Min, &tp));
        add("sums of sums over two groups", sums(x.clone(), rank));
        for dim in [0, 1] {
            add(&format!("all-gather dim {dim}"), all_gather(x.clone(), dim, &tp));
            add(&format!("reduce-scatter dim {dim}"), reduce_scatter(x.clone(), dim, &tp));
        }
        add("transposed all-reduce", all_reduce(x.clone().transpose(), ReduceOp::Sum, &tp).transpose());
        for root in [0, size - 1] {
            add(&format!("broadcast from {root}"), broadcast(x.clone(), root, &tp));
        }
        // Member i sends i + j rows to member j; member 0 sends none to itself.
        let splits: Vec<usize> = (0..size).map(|peer| tp.rank() + peer).collect();
        let rows = ramp([splits.iter().sum(), 3], rank, dtype);
        add("all-to-all", all_to_all(rows, &splits, &splits, &tp));
        out.push((format!("ring {dtype:?}"), ring(rank, dtype)));
    }
    let ids = Tensor::<1, Int>::from_data(TensorData::from([rank.rank as i64 + 1, 1 << 20]), &rank.device);
    let integers = |x: Tensor<1, Int>| x.into_data().iter::<f64>().collect();
    out.push(("all-reduce of integers".into(), integers(all_reduce_int(ids.clone(), ReduceOp::Sum, &tp))));
    out.push(("all-gather of integers".into(), integers(all_gather_int(ids.clone(), 0, &dp))));
    out.push(("broadcast of integers".into(), integers(broadcast_int(ids, size - 1, &tp))));
    out
}

/// A long chain over two communicators, with work between the collectives and no wait of the host.
fn sums(x: Tensor<2>, rank: &Rank) -> Tensor<2> {
    let (tp, dp) = (rank.group(Axis::Tp), rank.group(Axis::Dp));
    let mut y = x;
    for _ in 0..50 {
        // The maximum and the subtraction keep the numbers small.
        y = all_reduce(y, ReduceOp::Sum, &tp) - 1.0;
        y = all_reduce(y.clamp(0.0, 3.0), ReduceOp::Max, &dp);
    }
    y
}

/// Messages in both directions of the ring, more than one in flight.
fn ring(rank: &Rank, dtype: DType) -> Vec<f64> {
    let (group, device) = (rank.group(Axis::Tp), &rank.device);
    connect(&group, device);
    let (me, size) = (group.rank(), group.size());
    let (next, previous) = ((me + 1) % size, (me + size - 1) % size);
    let mut out = Vec::new();
    for round in 1..=3 {
        send(ramp([round, 4], rank, dtype), next, &group);
        send(ramp([1, round], rank, dtype) + round as f64, previous, &group);
    }
    for round in 1..=3 {
        // In the order in which they were sent: of two ranks, one is both neighbours of the other.
        out.extend(host(recv([round, 4], dtype, device, previous, &group)));
        out.extend(host(recv([1, round], dtype, device, next, &group)));
    }
    out
}

/// Integers from 0 to 7, different on every rank.
pub fn ramp<const D: usize>(shape: [usize; D], rank: &Rank, dtype: DType) -> Tensor<D> {
    let count: usize = shape.iter().product();
    let values: Vec<f64> = (0..count).map(|i| ((i * 5 + rank.rank * 3) % 8) as f64).collect();
    Tensor::from_data(TensorData::new(values, shape), (&rank.device, dtype))
}
