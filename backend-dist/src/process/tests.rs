//! Worlds of several processes, with threads in their place: everything but the memory between them is as it is.

use super::{JoinError, ProcessWorld, Processes};
use crate::collective::*;
use crate::comm::{FailureCause, ReduceOp, RunError};
use crate::launch::{BoxError, Rank, launch};
use crate::mesh::{Axis, Mesh, ParallelLayout};
use burn::tensor::{DType, Device, Tensor, TensorData};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

fn world(process: usize, processes: usize, port: u16) -> ProcessWorld {
    let address = "127.0.0.1".to_string();
    let (patience, silence) = (Duration::from_secs(20), Duration::from_secs(20));
    ProcessWorld { process, processes, local: process, address, port, patience, silence }
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

/// What each "process" makes of its world.
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
        seen.push(format!("{:?}", group.all_reduce_scalar(0.1 * rank.rank as f64, ReduceOp::Sum).to_bits()));
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

/// The one failure that all processes report.
fn failure<T: std::fmt::Debug>(results: Vec<Result<T, RunError>>) -> RunError {
    let mut errors: Vec<RunError> = results.into_iter().map(Result::unwrap_err).collect();
    let first = errors.swap_remove(0);
    assert!(errors.iter().all(|error| *error == first), "{first}\n\n{errors:?}");
    first
}

#[test]
fn a_failing_rank_fails_all_processes_with_its_words() {
    for failing in [0, 3] {
        let error = failure(run(2, &mesh(2, 2), |rank| {
            if rank.rank == failing {
                return Err("no more ideas".into());
            }
            rank.group(Axis::World).barrier();
            Ok(())
        }));
        assert_eq!((error.rank, &error.cause), (failing, &FailureCause::Error("no more ideas".into())));
        let text = error.to_string();
        let other = 2 - failing / 2 * 2;
        assert!(text.contains(&format!("rank {other} (dp {}, tp 0; process {} on ", other / 2, other / 2)), "{text}");
    }
}

#[test]
fn ranks_of_two_processes_that_differ_are_both_named() {
    let error = failure(run(2, &mesh(1, 2), |rank| {
        let x = Tensor::<1>::zeros([2 + rank.rank], &rank.device);
        Ok(values(all_reduce(x, ReduceOp::Sum, &rank.group(Axis::Dp))))
    }));
    let FailureCause::Mismatch { issued, peer, expected } = &error.cause else { panic!("{error}") };
    assert_eq!(error.rank + peer, 1);
    assert_eq!([issued.payload.as_str(), expected.payload.as_str()].concat().matches("F32 [").count(), 2);
}

#[test]
fn waiting_for_a_process_that_has_finished_fails() {
    let error = failure(run(2, &mesh(1, 2), |rank| {
        if rank.rank == 0 {
            rank.group(Axis::Dp).barrier();
        }
        Ok(())
    }));
    assert_eq!((error.rank, &error.cause), (0, &FailureCause::Deadlock));
}

#[test]
fn a_process_that_is_gone_ends_the_others_at_once() {
    for gone in [0, 1] {
        let start = Instant::now();
        let results = each(3, |world| {
            let process = world.process;
            let joined = Processes::join(&world, &mesh(1, 6), &[]).unwrap();
            if process == gone {
                return None;
            }
            Some(joined.launch(&[Device::flex()], |rank| {
                rank.group(Axis::Dp).barrier();
                Ok(())
            }))
        });
        let mut results: Vec<_> = results.into_iter().flatten().collect();
        if gone == 0 {
            // Without the hub a process knows its own ranks only.
            results.truncate(1);
        }
        let error = failure(results);
        let FailureCause::Lost(lost) = &error.cause else { panic!("{error}") };
        assert_eq!((lost.process, lost.ranks), (gone, (2 * gone, 2 * gone + 1)));
        assert!(error.to_string().starts_with(&format!("process {gone} on ")), "{error}");
        assert!(start.elapsed() < Duration::from_secs(10));
    }
}

#[test]
fn a_process_that_falls_silent_is_gone() {
    let port = free_port();
    let silent = ProcessWorld { silence: Duration::from_secs(1), ..world(0, 2, port) };
    let other = thread::spawn(move || {
        // Says who it is, as the real one does, and then nothing.
        let me = crate::comm::remote::Introduction {
            process: 1,
            processes: 2,
            host: "elsewhere".into(),
            agreement: vec![("version".into(), env!("CARGO_PKG_VERSION").into()), ("layout".into(), "DP2".into())],
        };
        crate::comm::remote::meet_at(&world(1, 2, port), &me).unwrap()
    });
    let joined = Processes::join(&silent, &mesh(1, 2), &[]).unwrap();
    let result = joined.launch(&[Device::flex()], |rank| {
        rank.group(Axis::Dp).barrier();
        Ok(())
    });
    let error = result.unwrap_err().to_string();
    assert!(error.contains("process 1 on elsewhere (rank 1) is gone: it has given no sign of life for 1 s"), "{error}");
    drop(other.join());
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

fn joined(worlds: &[(ProcessWorld, Mesh, &str)]) -> Vec<Result<usize, JoinError>> {
    thread::scope(|scope| {
        let join = |(world, mesh, text): &(ProcessWorld, Mesh, &str)| {
            let (world, mesh, text) = (world.clone(), mesh.clone(), text.to_string());
            scope.spawn(move || Processes::join(&world, &mesh, &[("configuration", text)]).map(|it| it.process()))
        };
        let threads: Vec<_> = worlds.iter().map(join).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn processes_that_differ_hear_how_in_the_same_words() {
    let port = free_port();
    let case = |first: (Mesh, &'static str), second: (Mesh, &'static str)| {
        let worlds = [(world(0, 2, port), first.0, first.1), (world(1, 2, port), second.0, second.1)];
        let texts: Vec<String> = joined(&worlds).into_iter().map(|result| result.unwrap_err().to_string()).collect();
        assert_eq!(texts[0], texts[1]);
        texts[0].clone()
    };
    let text = case((mesh(2, 1), "a"), (mesh(1, 2), "a"));
    assert!(text.contains("has layout TP2, but process 1 on") && text.contains("has layout DP2"), "{text}");
    let text = case((mesh(2, 1), "same\nlr = 1\nend"), (mesh(2, 1), "same\nlr = 2\nend"));
    assert!(text.contains("has configuration lr = 1, but") && text.contains("has configuration lr = 2;"), "{text}");
}

#[test]
fn two_processes_of_one_number_are_refused() {
    let port = free_port();
    let worlds = [0, 1, 1].map(|process| (world(process, 3, port), mesh(1, 3), ""));
    for result in joined(&worlds) {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("two processes say that they are process 1 of 3"), "{error}");
    }
}

#[test]
fn who_does_not_come_is_named() {
    let soon = |process, port| ProcessWorld { patience: Duration::from_secs(1), ..world(process, 3, port) };
    let port = free_port();
    let late = joined(&[(soon(0, port), mesh(1, 3), ""), (world(2, 3, port), mesh(1, 3), "")]);
    for result in late {
        let error = result.unwrap_err().to_string();
        let words = format!("waited 1 s on 127.0.0.1 port {port}: process 1 of 3 did not come (there: 0 on ");
        assert!(error.starts_with(&words) && error.contains(", 2 on "), "{error}");
    }
    let error = joined(&[(soon(1, port), mesh(1, 3), "")]).remove(0).unwrap_err().to_string();
    assert!(error.starts_with("process 1 tried for 1 s to reach process 0 on 127.0.0.1"), "{error}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = joined(&[(soon(0, taken.local_addr().unwrap().port()), mesh(1, 3), "")]).remove(0).unwrap_err();
    assert!(error.to_string().contains("BURN_MEGATRON_PORT"), "{error}");
}

#[test]
fn strangers_on_the_port_do_not_matter() {
    let port = free_port();
    let server = thread::spawn(move || joined(&[(world(0, 2, port), mesh(1, 2), "")]).remove(0));
    let mut stranger = loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
            break stream;
        }
        thread::sleep(Duration::from_millis(10));
    };
    stranger.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mute = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(joined(&[(world(1, 2, port), mesh(1, 2), "")]), [Ok(1)]);
    assert_eq!(server.join().unwrap(), Ok(0));
    let mut answer = Vec::new();
    // However the connection ends, the stranger has learnt what it reached.
    let _ = stranger.read_to_end(&mut answer);
    assert!(answer.starts_with(b"burn-megatron"));
    drop(mute);
}

#[test]
fn ranks_that_cannot_be_shared_out_are_refused() {
    let error = Processes::join(&world(0, 4, 1), &mesh(2, 3), &[]).err().unwrap().to_string();
    assert!(error.starts_with("6 ranks (TP2 DP3) cannot be shared out over 4 processes"), "{error}");
    assert!(error.contains("nearest legal: 3 processes"), "{error}");
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
    let order = std::sync::Mutex::new(Vec::new());
    let done = each(2, |world| {
        let joined = Processes::join(&world, &mesh(1, 2), &[]).unwrap();
        let first = joined.first_then_others("first", || {
            order.lock().unwrap().push(joined.process());
            Ok::<_, Failed>(())
        });
        let second = joined.first_then_others("second", || match joined.process() {
            0 => Err(Failed("no such file".into())),
            _ => Ok(()),
        });
        (first, second)
    });
    assert_eq!(order.into_inner().unwrap(), [0, 1]);
    assert_eq!(done[0], (Ok(()), Err(Failed("no such file".into()))));
    let told = done[1].1.as_ref().unwrap_err().to_string();
    assert!(done[1].0.is_ok() && told.starts_with("rank 0 (dp 0) failed: no such file"), "{told}");
}
