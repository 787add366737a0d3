//! The recorder between threads, each with a mapping of its own, and between processes.

use super::*;
use crate::comm::one_host::create;
use crate::comm::one_host::tests::{PROCESSES, join, roles};
use crate::mesh::Axis;
use proptest::prelude::*;

/// Per member, a view of one recorder.
fn recorders(members: usize) -> Vec<SharedRecorder> {
    let (_file, place) = create(bytes(members)).unwrap();
    let open = |_| SharedRecorder { memory: SharedMemory::open(&place, bytes(members)).unwrap(), members };
    (0..members).map(open).collect()
}

fn others(member: usize, members: usize) -> impl Iterator<Item = usize> {
    (0..members).filter(move |peer| *peer != member)
}

fn gather(rows: u64) -> DeviceOp {
    DeviceOp::new(DeviceOpKind::AllGather(0), DType::F32, &[rows as usize, 4])
}

/// All-to-alls on which members agree, and now and then another operation.
fn operation(member: usize, members: usize, number: u64) -> DeviceOp {
    let rows = |from: usize, to: usize| (number as usize * 7 + from * 3 + to) % 50;
    let kind = match number % 3 {
        0 => DeviceOpKind::AllReduce(ReduceOp::Max),
        1 => DeviceOpKind::AllToAll {
            send: (0..members).map(|to| rows(member, to)).collect(),
            receive: (0..members).map(|from| rows(from, member)).collect(),
        },
        _ => DeviceOpKind::Broadcast(members - 1),
    };
    DeviceOp::new(kind, DType::BF16, &[number as usize, 64])
}

fn any_op(members: usize) -> impl Strategy<Value = DeviceOp> {
    let rows = || prop::collection::vec(0usize..1 << 40, members);
    let kind = prop_oneof![
        prop::sample::select(&REDUCTIONS[..]).prop_map(DeviceOpKind::AllReduce),
        (0usize..8).prop_map(DeviceOpKind::AllGather),
        (0usize..8).prop_map(DeviceOpKind::ReduceScatter),
        (0usize..1024).prop_map(DeviceOpKind::Broadcast),
        (0usize..1024).prop_map(DeviceOpKind::Reduce),
        (rows(), rows()).prop_map(|(send, receive)| DeviceOpKind::AllToAll { send, receive }),
        Just(DeviceOpKind::Message),
    ];
    let shape = prop::collection::vec(0usize..1 << 20, 0..3);
    (kind, prop::sample::select(&DTYPES[..]), shape).prop_map(|(kind, dtype, shape)| DeviceOp::new(kind, dtype, &shape))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn operations_are_read_as_they_were_written(op in any_op(5), number in 0u64..1 << 40) {
        let recorders = recorders(5);
        prop_assert_eq!(recorders[3].issue(3, number, &op, others(3, 5)), Ok(()));
        prop_assert_eq!(recorders[1].read(3, number), Some(op));
        prop_assert_eq!(recorders[1].read(3, number + 1), None);
        prop_assert_eq!(recorders[1].read(3, number + SLOTS as u64), None);
        prop_assert_eq!(recorders[1].read(2, number), None);
    }

    /// Members issue in any order, some of them far ahead; one differs in one operation.
    #[test]
    fn whoever_comes_second_notices_the_one_that_differs(
        members in 2usize..5,
        turns in prop::collection::vec((0usize..5, 1u64..1500), 1..30),
        (wrong, at) in (0usize..5, 0u64..4000),
    ) {
        let (recorders, wrong) = (recorders(members), wrong % members);
        let mut issued = vec![0; members];
        for (member, count) in turns {
            let member = member % members;
            for _ in 0..count {
                let number = issued[member];
                issued[member] += 1;
                let op = match (member, number) == (wrong, at) {
                    true => gather(3),
                    false => operation(member, members, number),
                };
                // Whose operation of this number is still in its ring.
                let there = |peer: &usize| issued[*peer] > number && issued[*peer] <= number + SLOTS as u64;
                let differs = |peer: &usize| number == at && (member == wrong || *peer == wrong);
                let expected = others(member, members).filter(there).find(differs).map(|peer| {
                    let theirs = if peer == wrong { gather(3) } else { operation(peer, members, number) };
                    Disagreement { peer, theirs: Box::new(theirs) }
                });
                let found = recorders[member].issue(member, number, &op, others(member, members)).err();
                prop_assert_eq!(found, expected, "operation {} of member {}", number, member);
            }
        }
    }
}

#[test]
fn threads_that_overtake_each_other_raise_no_false_alarm() {
    let members = 3;
    let recorders = recorders(members);
    std::thread::scope(|scope| {
        for (member, recorder) in recorders.iter().enumerate() {
            scope.spawn(move || {
                for number in 0..40 * SLOTS as u64 {
                    let op = operation(member, members, number);
                    assert_eq!(recorder.issue(member, number, &op, others(member, members)), Ok(()));
                    // Each is the last one for a while.
                    if number % 5000 == 1700 * member as u64 {
                        std::thread::sleep(std::time::Duration::from_millis(5));
                    }
                }
            });
        }
    });
}

#[test]
fn of_two_members_at_the_same_time_one_notices() {
    for _ in 0..30 {
        let (recorders, arrived) = (recorders(2), AtomicU64::new(0));
        let differs = |member: usize, number: u64| {
            arrived.fetch_add(1, Ordering::AcqRel);
            let mut looks = 0;
            while arrived.load(Ordering::Acquire) < 2 * (number + 1) {
                looks += 1;
                if looks < 200 { std::hint::spin_loop() } else { std::thread::yield_now() }
            }
            recorders[member].issue(member, number, &gather(member as u64), others(member, 2)).is_err()
        };
        let [first, second] = std::thread::scope(|scope| {
            let issue =
                |member| scope.spawn(move || (0..1000).map(|number| differs(member, number)).collect::<Vec<_>>());
            [0, 1].map(issue).map(|thread| thread.join().unwrap())
        });
        assert!(first.iter().zip(second).all(|(first, second)| *first || second));
    }
}

/// A rank in each of several processes; rank 1 comes last to operation `wrong` and issues something else there.
fn run(process: usize, port: u16, wrong: Option<u64>) -> Result<Vec<()>, String> {
    let processes = join(process, port, 1);
    let on_rank = |rank: crate::launch::Rank| {
        let group = rank.group(Axis::World);
        group.share_recorder();
        let (world, id) = group.world.as_ref().unwrap();
        for number in 0..3 * SLOTS as u64 {
            let mut op = operation(group.rank(), group.size(), number);
            if wrong == Some(number) && rank.rank == 1 {
                group.barrier();
                op = gather(5);
            }
            assert_eq!(world.issue(*id, group.rank(), op), number);
            if wrong == Some(number) {
                // The second one is where the others learn of the failure.
                group.barrier();
                group.barrier();
            }
        }
        group.barrier();
        Ok(())
    };
    processes.launch(&[burn::tensor::Device::flex()], on_rank).map_err(|error| error.to_string())
}

#[test]
fn processes_that_issue_the_same_run_to_their_end() {
    let test = "comm::recorder::shared::tests::processes_that_issue_the_same_run_to_their_end";
    let (process, port, others) = roles(test);
    assert_eq!(run(process, port, None), Ok(vec![()]));
    for child in others {
        assert!(child.wait_with_output().unwrap().status.success());
    }
}

#[test]
fn all_processes_name_both_ranks_and_their_operations() {
    let test = "comm::recorder::shared::tests::all_processes_name_both_ranks_and_their_operations";
    let (process, port, others) = roles(test);
    let error = run(process, port, Some(1300)).unwrap_err();
    let expected = "rank 1 (dp 1) issued all-gather(dim 0) F32 [5, 4] on world[0, 1, 2] (operation 1300 of the group), but \
                    rank 0 issued all-to-all BF16 rows of [0, 64], sends [0, 1, 2], receives [0, 3, 6] on world[0, 1, 2] \
                    (operation 1300 of the group)";
    assert!(error.starts_with(expected), "{error}");
    assert_eq!(others.len(), if process == 0 { PROCESSES - 1 } else { 0 });
    for child in others {
        assert!(child.wait_with_output().unwrap().status.success());
    }
}
