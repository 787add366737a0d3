//! What holds for every schedule.

use proptest::prelude::*;

use super::*;

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

    /// Receives a pass ahead lose nothing against receives that are always there, as long as three messages take no
    /// longer than a pass; and each is posted before the pass before its own, or first of all.
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
