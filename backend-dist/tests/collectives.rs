//! The in-process transport: results, order, and what a run says when a rank misbehaves.

use backend_dist::collective::*;
use backend_dist::comm::{FailureCause, ReduceOp, RunError};
use backend_dist::launch::{BoxError, Rank, launch};
use backend_dist::mesh::{Axis, Mesh, ParallelLayout};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use std::time::{Duration, Instant};

fn mesh(tp: usize, dp: usize) -> Mesh {
    Mesh::new(ParallelLayout { tp, dp, ..Default::default() }).unwrap()
}

fn run<T: Send>(tp: usize, dp: usize, f: impl Fn(Rank) -> Result<T, BoxError> + Sync) -> Result<Vec<T>, RunError> {
    launch(&mesh(tp, dp), &[Device::flex()], f)
}

fn ramp<const D: usize>(rank: usize, shape: [usize; D], dtype: DType) -> Tensor<D> {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| (i + 1) as f64 + 100.0 * rank as f64).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), dtype))
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[test]
fn all_reduce_in_every_float_type_and_op() {
    for dtype in [DType::F32, DType::F64, DType::BF16] {
        for (op, expected) in
            [(ReduceOp::Sum, [303.0, 306.0]), (ReduceOp::Max, [201.0, 202.0]), (ReduceOp::Min, [1.0, 2.0])]
        {
            let out = run(3, 1, |r| Ok(values(all_reduce(ramp(r.rank, [2], dtype), op, &r.group(Axis::Tp))))).unwrap();
            for rank in out {
                let close = rank.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 0.01 * b);
                assert!(close, "{dtype:?} {op:?}: {rank:?}");
            }
        }
    }
}

#[test]
fn bf16_sums_are_rounded_once() {
    // 256 + 1 is not representable in bf16; four ones added one by one to 256 would all be lost.
    let out = run(5, 1, |r| {
        let x = Tensor::<1>::full([1], if r.rank == 0 { 256.0 } else { 1.0 }, (&r.device, DType::BF16));
        Ok(values(all_reduce(x, ReduceOp::Sum, &r.group(Axis::Tp))))
    });
    assert_eq!(out.unwrap()[0], [260.0]);
}

#[test]
fn sums_are_taken_in_rank_order_and_agree_bit_for_bit() {
    let out = run(4, 1, |r| {
        let x = Tensor::<1>::full([1], [1e16, 1.0, -1e16, 1.0][r.rank], (&r.device, DType::F64));
        Ok(values(all_reduce(x, ReduceOp::Sum, &r.group(Axis::Tp)))[0])
    });
    assert_eq!(out.unwrap(), [((1e16 + 1.0) - 1e16) + 1.0; 4]);
}

#[test]
fn gather_and_scatter_along_every_dimension() {
    let out = run(2, 1, |r| {
        let g = r.group(Axis::Tp);
        let x = ramp(r.rank, [2, 2], DType::F64);
        Ok([
            values(all_gather(x.clone(), 0, &g)),
            values(all_gather(x.clone(), 1, &g)),
            values(reduce_scatter(x.clone(), 0, &g)),
            values(reduce_scatter(x.clone().transpose(), 1, &g)),
            values(broadcast(x, 1, &g)),
        ])
    })
    .unwrap();
    let [rows, columns, ..] = &out[0];
    assert_eq!(rows, &[1.0, 2.0, 3.0, 4.0, 101.0, 102.0, 103.0, 104.0]);
    assert_eq!(columns, &[1.0, 2.0, 101.0, 102.0, 3.0, 4.0, 103.0, 104.0]);
    assert_eq!((&out[0][2], &out[1][2]), (&vec![102.0, 104.0], &vec![106.0, 108.0]));
    assert_eq!((&out[0][3], &out[1][3]), (&vec![102.0, 104.0], &vec![106.0, 108.0]), "a transposed view");
    assert_eq!(out[0][4], [101.0, 102.0, 103.0, 104.0]);
}

#[test]
fn all_to_all_with_uneven_and_empty_splits() {
    // Rank r sends r rows to rank 0 and one row to each other rank.
    let out = run(3, 1, |r| {
        let send = [r.rank, 1, 1];
        let receive = if r.rank == 0 { [0, 1, 2] } else { [1, 1, 1] };
        let x = ramp(r.rank, [r.rank + 2, 1], DType::F32);
        Ok(values(all_to_all(x, &send, &receive, &r.group(Axis::Tp))))
    })
    .unwrap();
    assert_eq!(out, [vec![101.0, 201.0, 202.0], vec![1.0, 102.0, 203.0], vec![2.0, 103.0, 204.0]]);
}

#[test]
fn integers_and_point_to_point() {
    let out = run(2, 1, |r| {
        let g = r.group(Axis::Tp);
        let x = Tensor::<1, Int>::from_data([1 + r.rank as i64, -5], &r.device);
        let sum: Vec<i64> = all_reduce_int(x, ReduceOp::Sum, &g).into_data().iter().collect();
        let got = if g.rank() == 0 {
            send(ramp(0, [2, 3], DType::BF16), 1, &g);
            send(ramp(1, [1], DType::F64), 1, &g);
            vec![]
        } else {
            let first = values(recv::<2>([2, 3], DType::BF16, &r.device, 0, &g));
            [first, values(recv::<1>([1], DType::F64, &r.device, 0, &g))].concat()
        };
        Ok((sum, got))
    })
    .unwrap();
    assert_eq!(out[0].0, [3, -10]);
    assert_eq!(out[1].1, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 101.0]);
}

#[test]
fn groups_of_several_axes_do_not_mix() {
    let out = run(2, 2, |r| {
        let one = |axis| values(all_reduce(ramp(r.rank, [1], DType::F64), ReduceOp::Sum, &r.group(axis)))[0];
        Ok([one(Axis::Dp), one(Axis::Tp), one(Axis::World), one(Axis::Dp)])
    })
    .unwrap();
    assert_eq!(
        out,
        [
            [202.0, 102.0, 604.0, 202.0],
            [402.0, 102.0, 604.0, 402.0],
            [202.0, 502.0, 604.0, 202.0],
            [402.0, 502.0, 604.0, 402.0]
        ]
    );
}

/// Fails the test when the run takes longer than the promised ten seconds to end.
fn fails(tp: usize, dp: usize, f: impl Fn(Rank) -> Result<(), BoxError> + Sync) -> RunError {
    let start = Instant::now();
    let error = run(tp, dp, f).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10));
    error
}

#[test]
fn a_panic_names_the_rank_and_what_the_others_wait_for() {
    let error = fails(2, 2, |r| {
        let g = r.group(Axis::World);
        all_reduce(ramp(r.rank, [3], DType::F32), ReduceOp::Sum, &g);
        assert!(r.rank != 2, "the loss went up");
        all_reduce(ramp(r.rank, [4], DType::F32), ReduceOp::Sum, &g);
        Ok(())
    });
    assert_eq!(error.rank, 2);
    let text = error.to_string();
    assert!(text.contains("rank 2 (dp 1, tp 0) panicked: the loss went up (at "), "{text}");
    assert!(text.contains("all-reduce(sum) F32"), "{text}");
}

#[test]
fn an_error_keeps_its_message() {
    let error = fails(2, 1, |r| {
        if r.rank == 1 {
            return Err("no such file: weights.bin".into());
        }
        r.group(Axis::Tp).barrier();
        Ok(())
    });
    assert_eq!((error.rank, &error.cause), (1, &FailureCause::Error("no such file: weights.bin".into())));
}

#[test]
fn another_shape_another_operation_or_another_type_is_a_mismatch() {
    type Step = fn(&Rank);
    let cases: [Step; 3] = [
        |r| drop(all_reduce(ramp(0, [2 + r.rank, 8], DType::F32), ReduceOp::Sum, &r.group(Axis::Tp))),
        |r| drop(all_reduce(ramp(0, [2], [DType::F32, DType::F64][r.rank]), ReduceOp::Sum, &r.group(Axis::Tp))),
        |r| {
            let x = ramp(0, [2], DType::F32);
            drop(if r.rank == 0 {
                all_gather(x, 0, &r.group(Axis::Tp))
            } else {
                all_reduce(x, ReduceOp::Sum, &r.group(Axis::Tp))
            });
        },
    ];
    for case in cases {
        let error = fails(2, 1, |r| {
            case(&r);
            Ok(())
        });
        assert!(matches!(error.cause, FailureCause::Mismatch { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 0") && text.contains("rank 1") && text.contains("all-reduce(sum) F"), "{text}");
    }
}

#[test]
fn waiting_for_a_rank_that_has_finished_is_a_deadlock() {
    let error = fails(4, 1, |r| {
        if r.rank != 3 {
            r.group(Axis::Tp).barrier();
        }
        Ok(())
    });
    assert_eq!(error.cause, FailureCause::Deadlock);
    assert!(error.to_string().contains("rank 3 (tp 3): finished without any operation"), "{error}");
}

#[test]
fn waiting_in_a_circle_is_a_deadlock() {
    // Both orders are legal alone; together nobody can move.
    let error = fails(2, 2, |r| {
        let (first, second) = if r.rank % 3 == 0 { (Axis::Tp, Axis::Dp) } else { (Axis::Dp, Axis::Tp) };
        r.group(first).barrier();
        r.group(second).barrier();
        Ok(())
    });
    assert_eq!(error.cause, FailureCause::Deadlock);
    assert!(error.to_string().contains("waiting in barrier on "), "{error}");
}

#[test]
fn receiving_what_nobody_sends_is_a_deadlock() {
    let error = fails(2, 1, |r| {
        let g = r.group(Axis::Tp);
        drop(recv::<1>([1], DType::F32, &r.device, 1 - g.rank(), &g));
        Ok(())
    });
    assert_eq!(error.cause, FailureCause::Deadlock);
}

#[test]
fn receiving_another_shape_than_sent_is_a_mismatch() {
    let error = fails(2, 1, |r| {
        let g = r.group(Axis::Tp);
        match g.rank() {
            0 => send(ramp(0, [2, 2], DType::F32), 1, &g),
            _ => drop(recv::<1>([4], DType::F32, &r.device, 0, &g)),
        }
        Ok(())
    });
    assert!(error.to_string().contains("receive from rank 0 F32 [4]"), "{error}");
    assert!(error.to_string().contains("send to rank 1 F32 [2, 2]"), "{error}");
}

#[test]
fn a_thousand_launches_leave_nothing_behind() {
    for _ in 0..1000 {
        let out = run(2, 1, |r| Ok(r.group(Axis::Tp).all_gather_host(r.rank))).unwrap();
        assert_eq!(out, [[0, 1], [0, 1]]);
    }
}
