//! Whatever fails anywhere ends all processes, with the words of whoever failed.

use super::*;
use crate::comm::FailureCause;
use crate::comm::remote::Introduction;
use crate::process::introduction::introduction;
use std::time::Instant;

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
            // Without process 0 a process knows its own ranks only.
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
        // Introduces itself as the real one, and then says nothing.
        let other = world(1, 2, port);
        let me = introduction(&other, "DP2", &[]);
        crate::comm::remote::rendezvous(&other, &Introduction { host: "elsewhere".into(), ..me }).unwrap()
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
