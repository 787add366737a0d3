use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use ScheduleKind::{GPipe, Interleaved, NoPipeline, OneFOneB, ZbH1, ZbV};

/// All specifications with these sizes that are legal, with every group size.
fn specs(ranks: usize, micro_batches: usize, chunks: usize) -> impl Iterator<Item = ScheduleSpec> {
    let kinds = ScheduleKind::ALL.map(|kind| ScheduleSpec::new(kind, ranks, micro_batches));
    let specs = kinds.into_iter().map(move |spec| spec.with_virtual_pipeline(chunks));
    let groups = move |spec: ScheduleSpec| {
        let sizes = (1..=micro_batches).map(Some).chain([None]);
        sizes.map(move |group_size| ScheduleSpec { group_size, ..spec })
    };
    specs.flat_map(groups).filter(|spec| spec.check().is_ok())
}

fn any_spec() -> impl Strategy<Value = ScheduleSpec> {
    (0..ScheduleKind::ALL.len(), 1..17_usize, 1..65_usize, 2..6_usize, any::<prop::sample::Index>()).prop_map(
        |(kind, ranks, micro_batches, chunks, pick)| {
            let kind = ScheduleKind::ALL[kind];
            let ranks = match kind {
                NoPipeline => 1,
                Interleaved | ZbV => ranks.max(2),
                _ => ranks,
            };
            if kind != Interleaved {
                return ScheduleSpec::new(kind, ranks, micro_batches);
            }
            let micro_batches = micro_batches.max(ranks);
            let legal: Vec<_> = specs(ranks, micro_batches, chunks).filter(|spec| spec.kind == kind).collect();
            *pick.get(&legal)
        },
    )
}

fn uniform(spec: &ScheduleSpec, [forward, input, weight]: [Ticks; 3]) -> Costs {
    Costs::uniform(spec.placement().stages(), forward, input, weight)
}

fn play(spec: ScheduleSpec, costs: &Costs, link: Link) -> Timeline {
    simulate(&Schedule::new(spec).unwrap(), costs, link).unwrap()
}

fn letters(schedule: &Schedule, rank: usize) -> String {
    let pass = |work: Work| format!("{}{}.{}", work.pass.letter(), work.micro_batch, work.chunk);
    schedule.passes(rank).map(pass).collect::<Vec<_>>().join(" ")
}

/// Forward passes before the first backward; one of them belongs to the first pair.
fn early_forwards(schedule: &Schedule) -> Vec<usize> {
    (0..schedule.ranks.len()).map(|r| schedule.passes(r).take_while(|w| w.pass == Pass::Forward).count()).collect()
}

#[test]
fn warm_up_as_megatron() {
    let early = |spec| early_forwards(&Schedule::new(spec).unwrap());
    assert_eq!(early(ScheduleSpec::new(OneFOneB, 4, 8)), [4, 3, 2, 1]);
    assert_eq!(early(ScheduleSpec::new(OneFOneB, 4, 2)), [2, 2, 2, 1]);
    assert_eq!(early(ScheduleSpec::new(OneFOneB, 4, 8).with_virtual_pipeline(2)), [11, 9, 7, 5]);
    assert_eq!(early(ScheduleSpec::new(OneFOneB, 4, 8).with_virtual_pipeline(3)), [15, 13, 11, 9]);
    assert_eq!(early(ScheduleSpec::new(OneFOneB, 4, 10).with_virtual_pipeline(2).with_group_size(5)), [12, 10, 8, 6]);
    assert_eq!(early(ScheduleSpec::new(OneFOneB, 4, 4).with_virtual_pipeline(2)), [8, 8, 7, 5]);
}

/// The table in the comments of Megatron's schedules.py: 2 ranks, 5 micro-batches in groups of 3, 2 chunks.
#[test]
fn interleaving_as_megatrons_table() {
    let spec = ScheduleSpec::new(Interleaved, 2, 5).with_virtual_pipeline(2).with_group_size(3);
    let schedule = Schedule::new(spec).unwrap();
    let of = |rank, pass| {
        let passes = schedule.passes(rank).filter(move |work| work.pass == pass);
        passes.map(|work| (work.micro_batch, work.chunk)).collect::<Vec<_>>()
    };
    let table = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)];
    for rank in 0..2 {
        assert_eq!(of(rank, Pass::Forward), table);
        assert_eq!(of(rank, Pass::Backward), table.map(|(micro_batch, chunk)| (micro_batch, 1 - chunk)));
    }
}

/// Figures 2 and 3 of arXiv 2401.10241: the last rank of 1F1B, the first and last of ZB-H1.
#[test]
fn orders_as_in_the_papers() {
    let schedule = |kind, micro_batches| Schedule::new(ScheduleSpec::new(kind, 3, micro_batches)).unwrap();
    assert_eq!(letters(&schedule(OneFOneB, 3), 2), "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0");
    assert_eq!(letters(&schedule(GPipe, 2), 0), "F0.0 F1.0 B0.0 B1.0");
    assert_eq!(letters(&schedule(ZbH1, 4), 0), "F0.0 F1.0 F2.0 I0.0 W0.0 F3.0 I1.0 W1.0 I2.0 W2.0 I3.0 W3.0");
    assert_eq!(letters(&schedule(ZbH1, 4), 2), "F0.0 I0.0 F1.0 I1.0 F2.0 I2.0 W0.0 F3.0 I3.0 W1.0 W2.0 W3.0");
}

#[test]
fn every_small_schedule_can_be_run() {
    let mut seen = HashMap::new();
    for (ranks, micro_batches, chunks) in
        (1..=6).flat_map(|p| (1..=12).flat_map(move |m| (1..=3).map(move |v| (p, m, v))))
    {
        for spec in specs(ranks, micro_batches, chunks) {
            for spec in [spec, spec.forward_only()] {
                Schedule::new(spec).unwrap().check().unwrap_or_else(|fault| panic!("{spec:?}: {fault}"));
            }
            *seen.entry(spec.kind).or_insert(0) += 1;
        }
    }
    assert_eq!((seen[&NoPipeline], seen[&GPipe], seen[&OneFOneB]), (12, 72, 72));
    assert_eq!((seen[&ZbH1], seen[&ZbV]), (72, 60));
    assert!(seen[&Interleaved] > 400, "{seen:?}");
}

proptest! {
    /// Complete, ordered, matched, free of deadlock.
    #[test]
    fn every_schedule_can_be_run(spec in any_spec(), forward_only: bool) {
        let schedule = Schedule::new(ScheduleSpec { forward_only, ..spec }).unwrap();
        prop_assert_eq!(schedule.check(), Ok(()));
    }

    #[test]
    fn bubbles_are_those_of_the_formulas(spec in any_spec(), costs in prop::array::uniform3(1_u64..20)) {
        for costs in [costs, [costs[0]; 3]] {
            let timeline = play(spec, &uniform(&spec, costs), Link::Overlapped);
            let [forward, input, weight] = costs;
            if let Some(bubble) = bounds::bubble(&spec, forward, input, weight) {
                for rank in 0..spec.pipeline_parallel {
                    prop_assert_eq!(timeline.bubble(rank), bubble, "rank {} with {:?}", rank, costs);
                }
            }
        }
    }

    #[test]
    fn activations_stay_within_their_bound(spec in any_spec()) {
        let peaks = Schedule::new(spec).unwrap().peak_activations(|_| 1);
        for (rank, &peak) in peaks.iter().enumerate() {
            let bound = bounds::activations(&spec, rank) as u64;
            let exact = spec.kind != ZbV || spec.micro_batches >= 2 * spec.pipeline_parallel;
            prop_assert!(if exact { peak == bound } else { peak <= bound }, "rank {}: {} of {}", rank, peak, bound);
        }
    }

    #[test]
    fn tensors_do_not_pile_up_at_their_receivers(spec in any_spec(), forward_only: bool) {
        let spec = ScheduleSpec { forward_only, ..spec };
        for (rank, peak) in Schedule::new(spec).unwrap().peak_received().into_iter().enumerate() {
            prop_assert!(peak <= bounds::received(&spec), "rank {}: {}", rank, peak);
        }
    }

    /// Stages of any cost, none too, and transfers that take time: every pass starts at once when the rank is free and
    /// its input is there, and stricter links never make a step shorter.
    #[test]
    fn timelines_are_tight(
        spec in any_spec(), layers in prop::collection::vec(0_usize..5, 96),
        costs in prop::array::uniform3(0_u64..9), transfer in 0_u64..7,
    ) {
        let stages = spec.placement().stages();
        let costs = Costs::per_layer(&layers[..stages], costs[0], costs[1], costs[2]).with_transfer(transfer);
        let timeline = play(spec, &costs, Link::Overlapped);
        is_tight(spec, &timeline, &costs);
        let steps = [Link::Overlapped, Link::InOrder, Link::Blocking].map(|link| play(spec, &costs, link).makespan());
        prop_assert!(steps.is_sorted(), "{:?}", steps);
    }

    /// Receives a pass ahead lose nothing against receives that are always there, as long as three messages take no longer than a
    /// pass; and each is posted in front of the pass before its own, or first of all.
    #[test]
    fn receives_a_pass_ahead_hide_messages(
        spec in any_spec(), layers in prop::collection::vec(1_usize..4, 96),
        costs in prop::array::uniform3(3_u64..9), transfer in 0_u64..2,
    ) {
        let stages = spec.placement().stages();
        let costs = Costs::per_layer(&layers[..stages], costs[0], costs[1], costs[2]).with_transfer(transfer);
        let schedule = Schedule::new(spec).unwrap();
        let posted = schedule.posted();
        let steps = [(&schedule, Link::Overlapped), (&posted, Link::Posted)]
            .map(|(schedule, link)| simulate(schedule, &costs, link).unwrap().makespan());
        prop_assert_eq!(steps[0], steps[1]);
        for (rank, list) in posted.ranks.iter().enumerate() {
            let passes = |range: std::ops::Range<usize>| {
                list[range].iter().filter(|action| matches!(action, Action::Compute(_))).count()
            };
            for (index, action) in list.iter().enumerate() {
                let Action::Compute(work) = action else { continue };
                if let Some(Input::Remote(transfer)) = schedule.input(rank, *work) {
                    let at = list.iter().position(|action| *action == Action::Recv(transfer)).unwrap();
                    prop_assert!(passes(at..index) >= 1 || passes(0..index) == 0, "rank {}: {:?}", rank, work);
                }
            }
        }
    }

    /// One NCCL stream per rank costs nothing as long as a backward takes one to two forwards.
    #[test]
    fn transfers_in_order_delay_nobody(spec in any_spec(), forward in 1_u64..20, parts in any::<(u8, u8)>()) {
        let backward = forward + u64::from(parts.0) % (forward + 1);
        let input = u64::from(parts.1) % (backward + 1);
        let costs = uniform(&spec, [forward, input, backward - input]);
        let [free, in_order] = [Link::Overlapped, Link::InOrder].map(|link| play(spec, &costs, link).makespan());
        prop_assert_eq!(free, in_order);
    }
}

fn is_tight(spec: ScheduleSpec, timeline: &Timeline, costs: &Costs) {
    let schedule = Schedule::new(spec).unwrap();
    let placement = spec.placement();
    let mut ends = HashMap::new();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        for span in spans {
            if let Action::Compute(work) = span.action {
                ends.insert((placement.stage(rank, work.chunk), work.pass, work.micro_batch), span.end);
            }
        }
    }
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let mut free = 0;
        for span in spans {
            let Action::Compute(work) = span.action else { continue };
            let stage = placement.stage(rank, work.chunk);
            let input = schedule.input(rank, work).map_or(0, |input| {
                let from = if work.pass == Pass::Forward { stage - 1 } else { stage + 1 };
                let transfer = if matches!(input, Input::Remote(_)) { costs.transfer } else { 0 };
                ends[&(from, work.pass, work.micro_batch)] + transfer
            });
            assert_eq!(span.start, free.max(input), "{spec:?} rank {rank}: {work}");
            assert_eq!(span.end - span.start, costs.pass(work.pass, stage));
            free = span.end;
        }
    }
}

#[test]
fn zero_bubble_is_a_third_and_a_sixth() {
    let bubble = |kind, chunks: u64| {
        let spec = ScheduleSpec::new(kind, 4, 16);
        // A chunk is so much smaller.
        play(spec, &uniform(&spec, [2 / chunks; 3]), Link::Overlapped).bubble(0)
    };
    assert_eq!((bubble(OneFOneB, 1), bubble(ZbH1, 1), bubble(ZbV, 2)), (18, 6, 3));
    let spec = ScheduleSpec::new(OneFOneB, 4, 8);
    let timeline = play(spec, &uniform(&spec, [1; 3]), Link::Overlapped);
    assert_eq!((timeline.bubble_ratio(), timeline.idle_share()), (3.0 / 8.0, 3.0 / 11.0));
}

#[test]
fn activations_are_weighed_by_stage() {
    let schedule = Schedule::new(ScheduleSpec::new(OneFOneB, 3, 8)).unwrap();
    assert_eq!(schedule.peak_activations(|stage| [5, 1, 10][stage]), [15, 2, 10]);
    let evaluation = Schedule::new(schedule.spec.forward_only()).unwrap();
    assert_eq!(evaluation.peak_activations(|_| 1), [1, 1, 1]);
    assert!(
        evaluation.ranks.iter().flatten().all(|action| !matches!(action, Action::ReduceGrads { .. } | Action::Step))
    );
}

/// Chunk 1 is done with its backwards before chunk 0, so its gradients can be reduced while chunk 0 computes.
#[test]
fn gradients_are_reduced_as_soon_as_they_are_complete() {
    let schedule = Schedule::new(ScheduleSpec::new(OneFOneB, 2, 4).with_virtual_pipeline(2)).unwrap();
    for list in &schedule.ranks {
        let at = |action: Action| list.iter().position(|&other| other == action).unwrap();
        let last = |chunk| at(Action::Compute(Work { pass: Pass::Backward, chunk, micro_batch: 3 }));
        assert!(at(Action::ReduceGrads { chunk: 1 }) < last(0));
        assert_eq!(list.last(), Some(&Action::Step));
    }
}

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
/// `send_forward_recv_backward`, and why transfers here stand in order of time.
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
    let words = "deadlock: rank 0 waits to send activation of micro-batch 1 to rank 1; \
                 rank 1 waits to send gradient of micro-batch 0 to rank 0";
    assert_eq!(fault, words);
}
