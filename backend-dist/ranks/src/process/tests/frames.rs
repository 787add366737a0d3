//! A process that sends what makes no sense ends the run, and is named.

use super::*;
use crate::comm::remote::{Contribution, Frame, Head, OpKey, rendezvous};
use crate::comm::{FailureCause, OpRecord, to_bytes};
use crate::process::introduction::introduction;
use std::io::{Read, Write};
use std::time::Instant;

fn bytes(head: Head, blobs: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let blobs = blobs.iter().map(|blob| blob.to_vec().into()).collect();
    Frame { head, blobs }.write(&mut bytes).unwrap();
    bytes
}

/// Joins as process 1 of two, sends these bytes and stays until process 0 hangs up.
fn impostor(port: u16, sent: Vec<u8>) {
    let other = world(1, 2, port);
    let (mut streams, ..) = rendezvous(&other, &introduction(&other, "DP2", &[])).unwrap();
    let mut stream = streams[0].take().unwrap();
    stream.write_all(&sent).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // However the connection ends, the run has ended before.
    let _ = stream.read_to_end(&mut Vec::new());
}

/// What process 0 says of a process 1 that sends these bytes, while `f` runs.
fn said_of(sent: Vec<u8>, f: impl FnOnce(&Processes) -> RunError) -> String {
    let (port, start) = (free_port(), Instant::now());
    let other = thread::spawn(move || impostor(port, sent));
    let joined = Processes::join(&world(0, 2, port), &mesh(1, 2), &[]).unwrap();
    let error = f(&joined);
    assert!(start.elapsed() < Duration::from_secs(15), "{error}");
    drop(joined);
    other.join().unwrap();
    let FailureCause::Lost(lost) = &error.cause else { panic!("{error}") };
    assert_eq!((lost.process, lost.ranks), (1, (1, 1)));
    error.to_string()
}

fn barrier(joined: &Processes) -> RunError {
    let result = joined.launch(&[Device::flex()], |rank| {
        rank.group(Axis::Dp).barrier();
        Ok(())
    });
    result.unwrap_err()
}

fn contribute(processes: &[usize], member: usize, rank: usize, blobs: &[&[u8]]) -> Vec<u8> {
    let record = OpRecord { name: "barrier".into(), payload: String::new(), group: "dp[0, 1]".into(), sequence: 0 };
    let op = OpKey { group: record.group.clone(), sequence: 0 };
    let contributions = vec![Contribution { member, rank, record }];
    bytes(Head::Contribute { op, processes: processes.to_vec(), contributions }, blobs)
}

#[test]
fn a_frame_that_makes_no_sense_ends_the_run_and_names_its_sender() {
    let failed = |rank, ranks| {
        let cause = FailureCause::Deadlock;
        bytes(Head::Failed(RunError { rank, coords: String::new(), cause, ranks }), &[])
    };
    let record = OpRecord { name: "send".into(), payload: String::new(), group: "dp[0, 1]".into(), sequence: 0 };
    let message = Head::Message { group: record.group.clone(), from: 1, to: 0, receiver: 1_000_000, record };
    let op = OpKey { group: "dp[0, 1]".into(), sequence: 0 };
    let unit = &to_bytes(&())[..];
    for (sent, said) in [
        (contribute(&[0, 1], 1, 1_000_000, &[unit]), "an input of rank 1000000, which it does not have"),
        (contribute(&[0, 1], 1, 0, &[unit]), "an input of rank 0, which it does not have"),
        (contribute(&[0, 999], 1, 1, &[unit]), "a collective whose 2 processes are not in order or not known"),
        (contribute(&[1, 0], 1, 1, &[unit]), "a collective whose 2 processes"),
        (contribute(&[0], 1, 1, &[unit]), "a collective whose 1 processes are not its own"),
        (bytes(Head::Linked, &[]), "that another process reaches it"),
        (contribute(&[0, 1], 1, 1, &[]), "0 blobs instead of 1"),
        (contribute(&[0, 1], 77, 1, &[unit]), "an input of member 77 of a group of 2"),
        (contribute(&[0, 1], 1, 1, &[b"\xc1\xc1"]), "it has sent "),
        (bytes(message, &[unit]), "a tensor for rank 1000000 of 2"),
        (bytes(Head::Gathered { op, members: Vec::new(), to: vec![0] }, &[]), "which only process 0 sends"),
        (failed(1_000_000, vec![String::new(); 2]), "a failure of rank 1000000 of 2 ranks"),
        (failed(1, vec![String::new(); 999]), "a failure of rank 1 of 999 ranks, not 2"),
        (vec![0xff; 64], "what it sends cannot be read (a frame with a head of 4294967295 bytes"),
        (b"\x04\0\0\0\0\0\0\0\xc1\xc1\xc1\xc1".to_vec(), "what it sends cannot be read ("),
    ] {
        let text = said_of(sent, barrier);
        assert!(text.starts_with("process 1 on ") && text.contains(said), "{said}: {text}");
    }
}

#[test]
fn a_value_of_another_type_is_an_error_that_names_its_process() {
    let group = "numbers of all processes".to_string();
    let record = OpRecord { name: "numbers".into(), payload: String::new(), group: group.clone(), sequence: 0 };
    let contributions = vec![Contribution { member: 1, rank: 1, record }];
    let head = Head::Contribute { op: OpKey { group, sequence: 0 }, processes: vec![0, 1], contributions };
    let text = said_of(bytes(head, &[&to_bytes(&"no number")]), |joined| {
        joined.channel("numbers").all_gather(&7u64).unwrap_err()
    });
    assert!(text.contains("it has sent numbers: "), "{text}");
}
