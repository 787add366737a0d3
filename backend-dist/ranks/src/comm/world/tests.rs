//! Whatever other processes send: no panic here, and the run knows what it can count on.

use super::*;
use crate::comm::failure::FailureCause;
use crate::comm::recorder::{DeviceOp, DeviceOpKind, Report};
use crate::comm::remote::{Frame, Head, Neighbours, Peer, fuzz};
use crate::process::ProcessWorld;
use burn::tensor::DType;
use proptest::prelude::*;
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

const PROCESSES: usize = 3;

fn world(process: usize) -> ProcessWorld {
    let silence = Duration::from_secs(20);
    ProcessWorld { silence, on_host: 1, one_host: false, ..ProcessWorld::on_one_host(process, PROCESSES, 1) }
}

/// Process `process` of three with `share` ranks each, connected to nobody.
fn remote(process: usize, share: usize) -> Remote {
    let hosts = (0..PROCESSES).map(|process| format!("host{process}")).collect();
    let peers = (0..PROCESSES).map(|_| None).collect();
    Remote::new(&world(process), share, hosts, peers)
}

#[test]
fn a_panic_in_a_reading_thread_ends_the_run_and_names_the_process() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut sender = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut remote = remote(0, 1);
    remote.peers[1] = Some(Peer::new(listener.accept().unwrap().0, remote.silence).unwrap());
    // A bug: the world lacks the ranks of process 2, so its state cannot be told.
    let world = World::over(vec!["dp 0".into(), "dp 1".into()], Some(remote));
    world.listen(Neighbours::of(&self::world(0)), None).unwrap();
    let (cause, ranks) = (FailureCause::Deadlock, vec![String::new(); PROCESSES]);
    let failed = Head::Failed(RunError { rank: 1, coords: String::new(), cause, ranks });
    Frame::from(failed).write(&mut sender).unwrap();
    let start = Instant::now();
    while world.failure().is_none() && start.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let error = world.failure().expect("the run has ended").to_string();
    assert!(error.starts_with("process 1 on host1 (rank 1) is gone: process 0 panicked while it read"), "{error}");
    world.end();
    world.close();
}

/// Mostly small numbers, so that some frames make sense.
fn number() -> impl Strategy<Value = usize> {
    prop_oneof![20 => 0..PROCESSES, 2 => 0..8usize, 1 => Just(999), 1 => Just(usize::MAX)]
}

fn record() -> impl Strategy<Value = OpRecord> {
    let group = prop_oneof![Just("dp[0, 2]"), Just("numbers of all processes")];
    (group, 0..3u64).prop_map(|(group, sequence)| {
        let (name, payload) = ("barrier".to_string(), String::new());
        OpRecord { name, payload, group: group.to_string(), sequence }
    })
}

fn report() -> impl Strategy<Value = Report> {
    let definition = proptest::option::of((Just("tp".to_string()), proptest::collection::vec(number(), 0..4)));
    let ops = proptest::collection::vec((0..2usize, 0..9usize), 0..3).prop_map(|ops| {
        let kinds = [DeviceOpKind::Message, DeviceOpKind::AllGather(0)];
        ops.into_iter().map(|(kind, dims)| DeviceOp::new(kinds[kind].clone(), DType::F32, &vec![2; dims])).collect()
    });
    (number(), definition, number(), 0..3u64, ops, any::<bool>()).prop_map(
        |(group, definition, member, first, ops, has_finished)| Report {
            group,
            definition,
            member,
            first,
            ops,
            has_finished,
        },
    )
}

fn head() -> impl Strategy<Value = Head> {
    let numbers = || proptest::collection::vec(number(), 0..4);
    let contribute = (record(), numbers(), proptest::collection::vec((number(), number()), 0..3));
    let gathered = (record(), proptest::collection::vec((number(), number()), 0..3), numbers());
    let message = (record(), number(), number(), number());
    prop_oneof![
        1 => Just(Head::Heartbeat),
        1 => Just(Head::Finished),
        6 => contribute.prop_map(|(record, processes, members)| {
            let op = OpKey { group: record.group.clone(), sequence: record.sequence };
            let call = |(member, rank)| Contribution { member, rank, record: record.clone() };
            Head::Contribute { op, processes, contributions: members.into_iter().map(call).collect() }
        }),
        3 => gathered.prop_map(|(record, members, to)| {
            Head::Gathered { op: OpKey { group: record.group, sequence: record.sequence }, members, to }
        }),
        1 => Just(Head::Linked),
        6 => proptest::collection::vec(report(), 0..4).prop_map(|reports| Head::Issued { reports }),
        3 => message.prop_map(|(record, from, to, receiver)| {
            Head::Message { group: record.group.clone(), from, to, receiver, record }
        }),
        2 => (number(), 0..8usize).prop_map(|(rank, lines)| {
            let (cause, ranks) = (FailureCause::Deadlock, vec!["waits".to_string(); lines]);
            Head::Failed(RunError { rank, coords: String::new(), cause, ranks })
        }),
    ]
}

proptest! {
    #![proptest_config(fuzz::cases())]

    #[test]
    fn any_frames_leave_a_world_that_can_say_what_its_ranks_do(
        process in 0..2usize,
        share in 1..3usize,
        frames in proptest::collection::vec((0..PROCESSES, head(), 0..3usize), 0..12),
    ) {
        let ranks = PROCESSES * share;
        let world = World::over(vec![String::new(); ranks], Some(remote(process, share)));
        let remote = world.remote.as_ref().unwrap();
        for (from, head, blobs) in frames {
            // Process 0 is connected to all others, and they are to process 0.
            let from = if process == 0 { from.max(1) } else { 0 };
            let failure = world.failure();
            if world.handle(remote, from, Frame { head, blobs: vec![Blob::default(); blobs] }).is_err() {
                prop_assert_eq!(world.failure(), failure, "a frame that is refused changes nothing");
            }
        }
        world.fail(0, FailureCause::Deadlock);
        let failure = world.failure().unwrap();
        prop_assert!(failure.rank < ranks && failure.ranks.len() == ranks);
    }
}
