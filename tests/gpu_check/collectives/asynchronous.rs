//! Asynchronous collectives: results, many in flight, and reuse of memory.

use super::{each, expect, halves};
use crate::report::Report;
use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::Axis;
use backend_dist::overlap::{Pending, all_gather_into, all_reduce_in_place, has_device_link, reduce_scatter_into};
use burn::tensor::{DType, Device, Tensor};

pub fn check(gpus: usize, report: &mut Report) {
    each(
        &halves(gpus),
        report,
        &[
            ("every rank has a GPU of its own, and a link", linked),
            ("asynchronous collectives, bf16 and f32", in_place_and_apart),
            ("many in flight, waited for in any order", many_in_flight),
            ("memory that is reused after a wait", memory_is_reused),
        ],
    );
}

fn linked(rank: &Rank) -> Result<(), BoxError> {
    if has_device_link(&rank.group(Axis::Tp), &rank.device) { Ok(()) } else { Err("there is no link".into()) }
}

fn full(length: usize, value: f64, device: &Device, dtype: DType) -> Tensor<1> {
    Tensor::full([length], value, (device, dtype))
}

fn in_place_and_apart(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    let (me, size, part) = (group.rank(), group.size(), 4096);
    let total: f64 = (1..=size).map(|i| i as f64).sum();
    for dtype in [DType::F32, DType::BF16] {
        let own = |length| full(length, me as f64 + 1.0, &rank.device, dtype);
        let buffer = own(part);
        all_reduce_in_place(&buffer, &group).wait();
        expect(buffer, "all-reduce", |_| total)?;

        let (source, target) = (own(part * size), own(part));
        reduce_scatter_into(&source, &target, &group).wait();
        expect(target, "reduce-scatter", |_| total)?;

        let (source, target) = (own(part), own(part * size));
        all_gather_into(&source, &target, &group).wait();
        expect(target, "all-gather", |i| (i / part + 1) as f64)?;
    }
    Ok(())
}

fn many_in_flight(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    let total: f64 = (1..=group.size()).map(|i| i as f64).sum();
    let (lengths, mut in_flight) = ([1 << 8, 1 << 24, 1 << 12, 1 << 22, 1 << 4, 1 << 20], Vec::new());
    for (i, length) in lengths.into_iter().enumerate() {
        let buffer = full(length, (group.rank() + 1) as f64 + i as f64, &rank.device, DType::F32);
        let pending = all_reduce_in_place(&buffer, &group);
        in_flight.push((i, buffer, pending));
    }
    // The large ones are waited for last, after the small ones that were issued later.
    for at in [4, 2, 0, 2, 1, 0] {
        let (i, buffer, pending) = in_flight.remove(at);
        Pending::wait(pending);
        expect(buffer, &format!("collective {i}"), |_| total + (i * group.size()) as f64)?;
    }
    Ok(())
}

fn memory_is_reused(rank: &Rank) -> Result<(), BoxError> {
    let group = rank.group(Axis::Tp);
    let (length, size) = (1 << 22, group.size());
    let total: f64 = (1..=size).map(|i| i as f64).sum();
    let mut sums = Vec::new();
    for round in 0..100 {
        let target = full(length, 0.0, &rank.device, DType::F32);
        let pending = {
            let source = full(length * size, (group.rank() + 1) as f64, &rank.device, DType::F32);
            reduce_scatter_into(&source, &target, &group)
        };
        // The source has no owner any more, but this tensor must not be allocated in its memory.
        let other = full(length * size, 1e6, &rank.device, DType::F32);
        pending.wait();
        drop(other);
        sums.push((round, target.max()));
    }
    for (round, max) in sums {
        expect(max, &format!("round {round}"), |_| total)?;
    }
    Ok(())
}
