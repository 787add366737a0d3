//! The board between threads, each with a mapping of its own, and between processes.

use super::*;
use crate::comm::one_host::agree;
use crate::comm::one_host::memory::{Place, TOKEN, create};
use crate::comm::one_host::tests::{PROCESSES, join, roles};
use crate::launch::launch;
use crate::mesh::{Axis, Mesh};
use burn::tensor::Device;
use proptest::prelude::*;
use std::process::Command;
use std::sync::atomic::AtomicBool;

const OPERATIONS: u64 = 2000;

/// What a member posts: other bytes and another length for each operation.
fn note(member: usize, number: u64) -> Vec<u8> {
    let length = (number as usize * 37 + member * 11) % 300 + if number.is_multiple_of(97) { LONGEST - 300 } else { 0 };
    (0..length).map(|at| (at as u64 * 7 + number * 13 + member as u64) as u8).collect()
}

fn boards(members: usize) -> Vec<SharedBoard> {
    let (_file, place) = create(bytes(members)).unwrap();
    let open = |member| SharedBoard { memory: SharedMemory::open(&place, bytes(members)).unwrap(), members, member };
    (0..members).map(open).collect()
}

/// Two ranks in each of several processes; the last rank of those that are to die is killed in operation `dies_at`.
/// How many operations each rank of this process has seen, and whether the run has failed.
fn run(process: usize, port: u16, dies_at: Option<u64>) -> Result<Vec<u64>, String> {
    let processes = join(process, port, 2);
    let on_rank = |rank: crate::launch::Rank| {
        let group = rank.group(Axis::World);
        let board = SharedBoard::meet(&group)?;
        for number in 0..OPERATIONS {
            if dies_at == Some(number) && rank.rank == group.size() - 1 {
                std::process::abort();
            }
            let Some(all) = board.all_gather(number, &note(rank.rank, number), || processes.failure().is_some()) else {
                return Ok(number);
            };
            for (member, found) in all.iter().enumerate() {
                assert_eq!(*found, note(member, number), "operation {number} of member {member}");
            }
        }
        Ok(OPERATIONS)
    };
    processes.launch(&[Device::flex()], on_rank).map_err(|error| error.to_string())
}

#[test]
fn processes_read_what_all_have_posted() {
    let (process, port, others) = roles("comm::one_host::board::tests::processes_read_what_all_have_posted");
    assert_eq!(run(process, port, None), Ok(vec![OPERATIONS; 2]));
    for child in others {
        assert!(child.wait_with_output().unwrap().status.success());
    }
}

#[test]
fn nobody_waits_for_a_process_that_has_died() {
    let (process, port, others) = roles("comm::one_host::board::tests::nobody_waits_for_a_process_that_has_died");
    let error = run(process, port, (process == PROCESSES - 1).then_some(700)).unwrap_err();
    assert!(error.contains("process 2 on") && error.contains("is gone"), "{error}");
    let ended: Vec<bool> = others.into_iter().map(|child| child.wait_with_output().unwrap().status.success()).collect();
    assert!(process > 0 || ended == [true, false], "{ended:?}");
}

#[test]
fn a_member_that_cannot_take_part_is_named_by_all() {
    let mesh = Mesh::new("DP3".parse().unwrap()).unwrap();
    let reasons = launch(&mesh, &[Device::flex()], |rank| {
        let own = if rank.rank == 1 { Err("no GPU".to_string()) } else { Ok(rank.rank) };
        Ok(agree(&rank.group(Axis::Dp), own))
    });
    assert_eq!(reasons.unwrap(), vec![Err("rank 1: no GPU".to_string()); 3]);
}

#[test]
fn the_memory_of_another_process_is_not_taken_for_the_board() {
    let (_file, place) = create(bytes(2)).unwrap();
    let refused = |place: Place, members| SharedMemory::open(&place, bytes(members)).err().unwrap();
    let other = "is another one here";
    assert!(refused(Place { token: [7; TOKEN], ..place.clone() }, 2).contains(other));
    assert!(refused(place.clone(), 3).contains(other));
    // The file is closed, or its process has ended.
    assert!(refused(Place { file: i32::MAX, ..place.clone() }, 2).contains("cannot be opened"));
    let mut child = Command::new("true").spawn().unwrap();
    child.wait().unwrap();
    assert!(refused(Place { process: child.id(), ..place }, 2).contains("cannot be opened"));
}

#[test]
fn nobody_waits_when_the_run_is_over() {
    let board = boards(2).swap_remove(0);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| board.all_gather(0, b"here", || over.load(Ordering::Acquire)));
        std::thread::sleep(Duration::from_millis(5));
        assert!(!waiting.is_finished());
        over.store(true, Ordering::Release);
        assert_eq!(waiting.join().unwrap(), None);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Members that are late by random times at random operations.
    #[test]
    fn members_read_the_notes_of_their_operation(
        members in 2usize..5,
        late in prop::collection::vec((0usize..5, 0u64..60, 0u64..400), 0..6),
    ) {
        let boards = boards(members);
        std::thread::scope(|scope| {
            for (member, board) in boards.iter().enumerate() {
                let late = &late;
                scope.spawn(move || {
                    for number in 0..60 {
                        let waits = late.iter().filter(|(who, when, _)| *who == member && *when == number);
                        waits.for_each(|(.., micros)| std::thread::sleep(Duration::from_micros(*micros)));
                        let all = board.all_gather(number, &note(member, number), || false).unwrap();
                        assert!(all.iter().enumerate().all(|(member, found)| *found == note(member, number)));
                    }
                });
            }
        });
    }
}
