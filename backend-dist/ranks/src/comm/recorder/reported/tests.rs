//! What process 0 makes of reports, and processes that are told that they are on different hosts.

use super::*;
use crate::comm::{ReduceOp, RunError};
use crate::launch::{BoxError, Rank};
use crate::mesh::{Axis, Mesh};
use crate::process::{ProcessWorld, Processes};
use burn::tensor::{DType, Device};
use std::net::TcpListener;
use std::time::{Duration, Instant};

fn reduce(length: usize) -> DeviceOp {
    DeviceOp::new(DeviceOpKind::AllReduce(ReduceOp::Sum), DType::BF16, &[length])
}

fn gather(length: usize) -> DeviceOp {
    DeviceOp::new(DeviceOpKind::AllGather(0), DType::F32, &[length])
}

/// A report of member `member` of the group `dp[0, 1, 2]`, one of each process; all name it.
fn report(member: usize, first: u64, ops: &[DeviceOp], has_finished: bool) -> Report {
    let definition = (first == 0).then(|| ("dp[0, 1, 2]".to_string(), vec![0, 1, 2]));
    Report { group: 4, definition, member, first, ops: ops.to_vec(), has_finished }
}

fn take(reported: &mut ReportedOps, report: Report) -> Result<Option<(usize, FailureCause)>, String> {
    let process = report.member;
    reported.take(process, process..process + 1, 3, report)
}

#[test]
fn however_operations_are_split_into_reports_the_first_that_differs_is_named() {
    let theirs: Vec<DeviceOp> = (0..40).map(reduce).collect();
    let mut other = theirs.clone();
    other[27] = gather(27);
    for pieces in [1, 3, 40] {
        let mut reported = ReportedOps::default();
        let mut found = Vec::new();
        for start in (0..40).step_by(40_usize.div_ceil(pieces)) {
            let end = (start + 40_usize.div_ceil(pieces)).min(40);
            for (member, ops) in [(2, &theirs), (0, &theirs), (1, &other)] {
                found.extend(take(&mut reported, report(member, start as u64, &ops[start..end], false)).unwrap());
                if !found.is_empty() {
                    break;
                }
            }
            if !found.is_empty() {
                break;
            }
        }
        let (rank, FailureCause::Mismatch { issued, peer, expected }) = found.remove(0) else { panic!("{found:?}") };
        assert_eq!((rank, peer), (1, 2));
        assert_eq!(issued.to_string(), "all-gather(dim 0) F32 [27] on dp[0, 1, 2] (operation 27 of the group)");
        assert_eq!(expected.to_string(), "all-reduce(sum) BF16 [27] on dp[0, 1, 2] (operation 27 of the group)");
    }
}

#[test]
fn who_has_finished_without_an_operation_is_named_whichever_report_comes_first() {
    let ops = [reduce(1), reduce(2)];
    for finished_first in [true, false] {
        let mut reported = ReportedOps::default();
        let mut reports = vec![report(1, 0, &ops[..1], true), report(0, 0, &ops, false)];
        if !finished_first {
            reports.reverse();
        }
        let last = reports.pop().unwrap();
        assert_eq!(take(&mut reported, reports.remove(0)), Ok(None));
        let (rank, cause) = take(&mut reported, last).unwrap().unwrap();
        let FailureCause::Missing { peer: 0, waiting_in } = cause else { panic!("{cause:?}") };
        assert_eq!((rank, waiting_in.sequence), (1, 1));
    }
    // Everybody has issued as much.
    let mut reported = ReportedOps::default();
    for member in 0..3 {
        assert_eq!(take(&mut reported, report(member, 0, &ops, true)), Ok(None));
    }
}

#[test]
fn reports_that_contradict_others_are_refused() {
    let mut reported = ReportedOps::default();
    take(&mut reported, report(1, 0, &[reduce(1)], false)).unwrap();
    let pair = DeviceOp::new(DeviceOpKind::Message, DType::F32, &[1]);
    let deep = DeviceOp { rank: DIMS + 1, ..reduce(1) };
    let named = |label: &str, ranks: &[usize]| {
        let definition = Some((label.to_string(), ranks.to_vec()));
        Report { definition, ..report(1, 1, &[], false) }
    };
    for (wrong, said) in [
        (report(1, 2, &[], false), "operation 2 of dp[0, 1, 2] after operation 1"),
        (report(7, 1, &[], false), "operations of member 7"),
        (Report { member: 0, ..report(1, 1, &[], false) }, "operations of member 0"),
        (Report { group: 9, ..report(1, 1, &[], false) }, "operations of a group 9 without its name"),
        (named("dp[0, 1, 2]", &[2, 1]), "other members of dp[0, 1, 2]"),
        (named("x", &[1, 3]), "a group of 2 ranks that are not all of 3"),
        (named("y", &[1]), "a group of 1 ranks"),
        (report(1, 1, &[pair], false), "an operation that dp[0, 1, 2] does not have"),
        (report(1, 1, &[deep], false), "an operation that dp[0, 1, 2] does not have"),
    ] {
        let error = reported.take(1, 1..2, 3, wrong).unwrap_err();
        assert!(error.starts_with(said), "{error}");
    }
}

/// A process with a rank on each of three "hosts"; rank `r` issues `ops(r)` on all ranks and, if `waits(r)`, waits for its
/// GPU, which is stuck.
fn hosts(
    ops: impl Fn(usize) -> Vec<DeviceOp> + Sync,
    waits: impl Fn(usize) -> bool + Sync,
) -> Vec<Result<Vec<()>, RunError>> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mesh = Mesh::new("DP3".parse().unwrap()).unwrap();
    let on_rank = |rank: Rank| -> Result<(), BoxError> {
        let group = rank.group(Axis::World);
        assert!(!group.is_on_one_host());
        group.share_recorder();
        let ((world, id), start) = (group.world.as_ref().unwrap(), Instant::now());
        for op in ops(rank.rank) {
            world.issue(*id, group.rank(), op);
        }
        while waits(rank.rank) && world.failure().is_none() && start.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let run = |process: usize| {
            let on_host = ProcessWorld { on_host: 1, local: 0, ..ProcessWorld::on_one_host(process, 3, port) };
            let world = ProcessWorld { patience: Duration::from_secs(30), one_host: false, ..on_host };
            Processes::join(&world, &mesh, &[]).unwrap().launch(&[Device::flex()], on_rank)
        };
        let threads: Vec<_> = (0..3).map(|process| scope.spawn(move || run(process))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn ranks_on_several_hosts_that_issue_the_same_run_to_their_end() {
    let results = hosts(|_| (1..5000).map(reduce).collect(), |_| false);
    assert_eq!(results, vec![Ok(vec![()]); 3]);
}

#[test]
fn all_hosts_name_both_ranks_and_their_operations() {
    let ops = |rank| match rank {
        1 => vec![reduce(8), gather(3), reduce(9)],
        _ => vec![reduce(8), reduce(9), reduce(9)],
    };
    let of = |op: &str| format!("issued {op} on world[0, 1, 2] (operation 1 of the group)");
    for result in hosts(ops, |_| true) {
        let error = result.unwrap_err().to_string();
        let named = error.contains(&of("all-gather(dim 0) F32 [3]")) && error.contains(&of("all-reduce(sum) BF16 [9]"));
        assert!(named && error.contains("rank 1"), "{error}");
    }
}

#[test]
fn a_rank_that_has_finished_while_another_host_waits_is_named() {
    let ops = |rank| if rank == 1 { vec![reduce(8)] } else { vec![reduce(8), reduce(9)] };
    for result in hosts(ops, |rank| rank != 1) {
        let error = result.unwrap_err().to_string();
        let missed = "rank 1 (dp 1) has finished without all-reduce(sum) BF16 [9] on world[0, 1, 2] (operation 1";
        assert!(error.starts_with(missed), "{error}");
    }
}
