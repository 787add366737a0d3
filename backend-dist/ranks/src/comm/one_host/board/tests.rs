//! The board between threads, each with a mapping of its own, and between processes.

use super::*;
use crate::launch::launch;
use crate::mesh::{Axis, Mesh};
use crate::process::{ProcessWorld, Processes};
use burn::tensor::Device;
use proptest::prelude::*;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;

/// Number of the process, and the port of the first, in processes that the tests start.
const PROCESS: &str = "BURN_MEGATRON_TEST_BOARD";
const PROCESSES: usize = 3;
const OPERATIONS: u64 = 2000;

/// What a member posts: other bytes and another length for each operation.
fn note(member: usize, number: u64) -> Vec<u8> {
    let length = (number as usize * 37 + member * 11) % 300 + if number.is_multiple_of(97) { LONGEST - 300 } else { 0 };
    (0..length).map(|at| (at as u64 * 7 + number * 13 + member as u64) as u8).collect()
}

fn boards(members: usize) -> Vec<SharedBoard> {
    let (_file, place) = create(members).unwrap();
    (0..members).map(|member| SharedBoard::open(&place, members, member).unwrap()).collect()
}

/// Starts this test once more as the other processes of a run.
fn others(test: &str, port: u16) -> Vec<Child> {
    let start = |process: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let test = format!("comm::one_host::board::tests::{test}");
        command.args(["--exact", "--nocapture", &test]).env(PROCESS, format!("{process} {port}"));
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    (1..PROCESSES).map(start).collect()
}

/// This process's number, the port, and the processes that it has started as the first.
fn roles(test: &str) -> (usize, u16, Vec<Child>) {
    match std::env::var(PROCESS) {
        Ok(role) => {
            let (process, port) = role.split_once(' ').unwrap();
            (process.parse().unwrap(), port.parse().unwrap(), Vec::new())
        }
        Err(_) => {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            (0, port, others(test, port))
        }
    }
}

/// Two ranks in each of several processes; the last rank of those that are to die is killed in operation `dies_at`.
/// How many operations each rank of this process has seen, and whether the run has failed.
fn run(process: usize, port: u16, dies_at: Option<u64>) -> Result<Vec<u64>, String> {
    let world =
        ProcessWorld { patience: Duration::from_secs(60), ..ProcessWorld::on_one_host(process, PROCESSES, port) };
    let mesh = Mesh::new(format!("DP{}", 2 * PROCESSES).parse().unwrap()).unwrap();
    let processes = Processes::join(&world, &mesh, &[]).unwrap();
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
    let (process, port, others) = roles("processes_read_what_all_have_posted");
    assert_eq!(run(process, port, None), Ok(vec![OPERATIONS; 2]));
    for child in others {
        assert!(child.wait_with_output().unwrap().status.success());
    }
}

#[test]
fn nobody_waits_for_a_process_that_has_died() {
    let (process, port, others) = roles("nobody_waits_for_a_process_that_has_died");
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
    let (_file, place) = create(2).unwrap();
    let refused = |place: Place, members| SharedBoard::open(&place, members, 0).err().unwrap();
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
