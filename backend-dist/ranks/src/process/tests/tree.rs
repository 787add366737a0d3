//! Many processes: what process 0 has to send.

use super::*;
use std::time::Instant;

const PROCESSES: usize = 32;
/// Elements of a tensor.
const LENGTH: usize = 25_000;

/// What comes of a broadcast from the last rank and of a gather of small values, and what process 0 sends for each:
/// frames, and bytes of tensors and values.
fn collectives(rank: &Rank, sent: impl Fn() -> (usize, usize)) -> (Vec<String>, Vec<(usize, usize)>) {
    let group = rank.group(Axis::Dp);
    let x = Tensor::<1>::full([LENGTH], 1.0 / (1.0 + rank.rank as f64), (&rank.device, DType::F32));
    group.barrier();
    let mut counts = vec![sent()];
    let mut note = |text: String| {
        // By then process 0 has sent all that was for others.
        counts.push(sent());
        text
    };
    let all = [
        note(format!("{:?}", broadcast(x, PROCESSES - 1, &group).into_data().bytes())),
        note(format!("{:?}", group.all_gather_host(vec![rank.rank as u8; 100]))),
    ];
    (all.into(), counts.windows(2).map(|two| (two[1].0 - two[0].0, two[1].1 - two[0].1)).collect())
}

#[test]
fn process_0_sends_to_eight_what_all_are_to_have() {
    let mesh = mesh(1, PROCESSES);
    let alone = launch(&mesh, &[Device::flex()], |rank| Ok(collectives(&rank, || (0, 0)).0)).unwrap();
    let results = each(PROCESSES, |world| {
        let (joined, start) = (Processes::join(&world, &mesh, &[]).unwrap(), Instant::now());
        let linked = || joined.world().linked_processes();
        while joined.is_first() && linked() < PROCESSES - 9 && start.elapsed() < Duration::from_secs(20) {
            thread::sleep(Duration::from_millis(10));
        }
        // Before it the others wait for process 0.
        joined.launch(&[Device::flex()], |rank| Ok(collectives(&rank, || joined.world().sent()))).unwrap()
    });
    let (texts, counts): (Vec<_>, Vec<_>) = results.into_iter().flatten().unzip();
    assert_eq!(texts, alone);
    let [broadcast, gather] = counts[0][..] else { panic!() };
    assert_eq!((broadcast.0, gather.0), (8, 8), "frames for {} processes", PROCESSES - 1);
    assert!((8 * 4 * LENGTH..8 * (4 * LENGTH + 100)).contains(&broadcast.1), "{} bytes", broadcast.1);
    // Each of the eight gets all values.
    assert!(gather.1 <= 8 * PROCESSES * 110, "{} bytes", gather.1);
}

#[test]
fn a_process_in_the_middle_that_is_gone_ends_all() {
    let results = each(20, |world| {
        let (process, joined) = (world.process, Processes::join(&world, &mesh(1, 20), &[]).unwrap());
        (process != 1).then(|| {
            joined.launch(&[Device::flex()], |rank| {
                rank.group(Axis::Dp).barrier();
                Ok(())
            })
        })
    });
    for result in results.into_iter().flatten() {
        let error = result.unwrap_err().to_string();
        assert!(error.starts_with("process 1 on "), "{error}");
    }
}
