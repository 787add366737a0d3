//! The check finds what is wrong with a schedule.

use super::*;

#[test]
fn faults_are_found() {
    let good = Schedule::new(ScheduleSpec::new(OneFOneB, 2, 3)).unwrap();
    let changed = |change: &dyn Fn(&mut Vec<Action>)| {
        let mut bad = good.clone();
        change(&mut bad.ranks[0]);
        bad.check().unwrap_err()
    };
    let compute = |pass, micro_batch| Action::Compute(Work { pass, chunk: 0, micro_batch });
    let swap = |list: &mut Vec<Action>, a: Action, b: Action| {
        let [a, b] = [a, b].map(|action| list.iter().position(|&other| other == action).unwrap());
        list.swap(a, b);
    };
    let sends: Vec<Action> = good.ranks[0].iter().copied().filter(|action| matches!(action, Action::Send(_))).collect();

    let fault = changed(&|list| list.retain(|&action| action != compute(Pass::Backward, 1)));
    assert_eq!(fault, Fault::TooEarly { rank: 0, action: Action::ReduceGrads { chunk: 0 } });
    let fault = changed(&|list| list.truncate(list.len() - 1));
    assert_eq!(fault, Fault::Missing { rank: 0, action: Action::Step });
    let fault = changed(&|list| list.push(compute(Pass::Forward, 0)));
    assert_eq!(fault, Fault::Unexpected { rank: 0, action: compute(Pass::Forward, 0) });
    let fault = changed(&|list| list.insert(0, compute(Pass::BackwardWeight, 0)));
    assert_eq!(fault, Fault::Unexpected { rank: 0, action: compute(Pass::BackwardWeight, 0) });
    let fault = changed(&|list| swap(list, compute(Pass::Forward, 2), compute(Pass::Backward, 2)));
    assert!(matches!(fault, Fault::TooEarly { rank: 0, .. }), "{fault}");
    let fault = changed(&|list| swap(list, compute(Pass::Forward, 0), sends[0]));
    assert_eq!(fault, Fault::TooEarly { rank: 0, action: sends[0] });
    let fault = changed(&|list| {
        swap(list, compute(Pass::Forward, 1), compute(Pass::Forward, 0));
        swap(list, sends[0], sends[1]);
    });
    assert_eq!(fault, Fault::Unmatched { from: 0, to: 1, index: 0 });
}

/// Sending right after and receiving right before each pass deadlocks as soon as sends block: why Megatron needs
/// `send_forward_recv_backward`, and why transfers here are listed in order of time.
#[test]
fn transfers_by_need_deadlock_if_sends_block() {
    let mut schedule = Schedule::new(ScheduleSpec::new(OneFOneB, 2, 3)).unwrap();
    for rank in 0..2 {
        let passes: Vec<Work> = schedule.passes(rank).collect();
        let mut list = Vec::new();
        for work in passes {
            if let Some(Input::Remote(transfer)) = schedule.input(rank, work) {
                list.push(Action::Recv(transfer));
            }
            list.push(Action::Compute(work));
            list.extend(schedule.output(rank, work).map(Action::Send));
        }
        list.extend([Action::ReduceGrads { chunk: 0 }, Action::Step]);
        schedule.ranks[rank] = list;
    }
    let fault = schedule.check().unwrap_err().to_string();
    let words = "deadlock: rank 0 waits at: send activation of micro-batch 1 to rank 1; \
                 rank 1 waits at: send gradient of micro-batch 0 to rank 0";
    assert_eq!(fault, words);
}
