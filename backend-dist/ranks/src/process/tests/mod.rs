//! Runs of several processes, with a thread for each process: all but their memory is as in a real run.

mod cluster;
mod failures;
mod frames;
mod joining;
mod tree;

use super::{ProcessWorld, Processes};
use crate::collective::*;
use crate::comm::{ReduceOp, RunError};
use crate::launch::{BoxError, Rank, launch};
use crate::mesh::{Axis, Mesh, ParallelLayout};
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::net::TcpListener;
use std::thread;
use std::time::Duration;

fn world(process: usize, processes: usize, port: u16) -> ProcessWorld {
    let (patience, silence) = (Duration::from_secs(20), Duration::from_secs(20));
    ProcessWorld { patience, silence, ..ProcessWorld::on_one_host(process, processes, port) }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn mesh(tp: usize, dp: usize) -> Mesh {
    Mesh::new(ParallelLayout { tp, dp, ..Default::default() }).unwrap()
}

fn values<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

/// The result of each "process".
fn each<T: Send>(processes: usize, f: impl Fn(ProcessWorld) -> T + Sync) -> Vec<T> {
    let port = free_port();
    thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> =
            (0..processes).map(|process| scope.spawn(move || f(world(process, processes, port)))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The ranks of a mesh over several processes; the results of each.
fn run<T: Send>(
    processes: usize,
    mesh: &Mesh,
    f: impl Fn(Rank) -> Result<T, BoxError> + Sync,
) -> Vec<Result<Vec<T>, RunError>> {
    each(processes, |world| Processes::join(&world, mesh, &[]).unwrap().launch(&[Device::flex()], &f))
}

/// All groups, all operations, all float types; everything that came out, as bits.
fn everything(rank: Rank) -> Result<Vec<String>, BoxError> {
    let mut seen = Vec::new();
    for axis in [Axis::Tp, Axis::Dp, Axis::World] {
        let group = rank.group(axis);
        let (size, next) = (group.size(), (group.rank() + 1) % group.size());
        for dtype in [DType::F64, DType::F32, DType::BF16] {
            let values: Vec<f64> = (0..4 * size).map(|i| 1.0 / (1.0 + (7 * i + 31 * rank.rank) as f64)).collect();
            let x = Tensor::<2>::from_data(TensorData::new(values, [size, 4]), (&rank.device, dtype));
            let mut note = |x: Tensor<2>| seen.push(format!("{axis}: {:?}", x.into_data().bytes()));
            note(all_reduce(x.clone(), ReduceOp::Sum, &group));
            note(all_reduce(x.clone(), ReduceOp::Max, &group));
            note(all_gather(x.clone(), 1, &group));
            note(reduce_scatter(x.clone(), 0, &group));
            note(broadcast(x.clone(), size - 1, &group));
            let ones = vec![1; size];
            note(all_to_all(x.clone(), &ones, &ones, &group));
            if size > 1 {
                let previous = (group.rank() + size - 1) % size;
                send(x.clone(), next, &group);
                note(recv([size, 4], dtype, &rank.device, previous, &group));
            }
        }
        group.barrier();
        seen.push(format!("{:?}", group.all_gather_host((rank.rank, Some(f64::NAN.to_bits()), None::<()>))));
        seen.push(format!("{:?}", group.broadcast_host((group.rank() == 0).then_some(Some(rank.rank)), 0)));
    }
    Ok(seen)
}

#[test]
fn any_number_of_processes_gives_the_bits_of_one() {
    let mesh = mesh(2, 2);
    let alone = launch(&mesh, &[Device::flex()], everything).unwrap();
    for processes in [2, 4] {
        let ranks: Vec<_> = run(processes, &mesh, everything).into_iter().flat_map(Result::unwrap).collect();
        assert_eq!(ranks, alone, "{processes} processes");
    }
}

#[test]
fn groups_know_where_their_members_are() {
    let seen = run(2, &mesh(2, 2), |rank| {
        let [tp, dp] = [Axis::Tp, Axis::Dp].map(|axis| rank.group(axis));
        Ok((tp.is_in_one_process(), dp.is_in_one_process(), rank.leads_process()))
    });
    let of_each = vec![(true, false, true), (true, false, false)];
    assert_eq!(seen, [Ok(of_each.clone()), Ok(of_each)]);
}

#[test]
fn heartbeats_outlast_a_long_computation() {
    let results = each(2, |world| {
        let world = ProcessWorld { silence: Duration::from_secs(1), ..world };
        Processes::join(&world, &mesh(1, 2), &[]).unwrap().launch(&[Device::flex()], |rank| {
            thread::sleep(Duration::from_millis(2500 * rank.rank as u64));
            Ok(rank.group(Axis::Dp).all_gather_host(rank.rank))
        })
    });
    assert_eq!(results, [Ok(vec![vec![0, 1]]), Ok(vec![vec![0, 1]])]);
}

#[test]
fn what_one_process_cannot_do_fails_all_before_the_launch() {
    #[derive(Debug, PartialEq, thiserror::Error)]
    #[error("{0}")]
    struct Failed(String);
    impl From<RunError> for Failed {
        fn from(error: RunError) -> Self {
            Self(error.to_string())
        }
    }
    let order = parking_lot::Mutex::new(Vec::new());
    let done = each(2, |world| {
        let joined = Processes::join(&world, &mesh(1, 2), &[]).unwrap();
        let first = joined.first_then_others("first", || {
            order.lock().push(joined.process());
            Ok::<_, Failed>(())
        });
        let second = joined.first_then_others("second", || match joined.process() {
            0 => Err(Failed("no such file".into())),
            _ => Ok(()),
        });
        (first, second)
    });
    assert_eq!(order.into_inner(), [0, 1]);
    assert_eq!(done[0], (Ok(()), Err(Failed("no such file".into()))));
    let told = done[1].1.as_ref().unwrap_err().to_string();
    assert!(done[1].0.is_ok() && told.starts_with("rank 0 (dp 0) failed: no such file"), "{told}");
}
