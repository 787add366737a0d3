//! Schedules are those of Megatron-LM and the papers.

mod faults;
mod properties;

use std::collections::HashMap;

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

/// The last step of an epoch may have fewer micro-batches than the interleaved schedule can take.
#[test]
fn all_forward_passes_then_all_backward_passes_is_complete_for_any_number_of_micro_batches() {
    for (ranks, chunks, micro_batches) in [(2, 2, 1), (4, 2, 3), (4, 3, 1), (3, 1, 5)] {
        let spec = ScheduleSpec::new(ScheduleKind::OneFOneB, ranks, micro_batches).with_virtual_pipeline(chunks);
        let schedule = Schedule::all_forward_all_backward(spec);
        schedule.check().unwrap();
        for rank in 0..ranks {
            let passes: Vec<Pass> = schedule.passes(rank).map(|work| work.pass).collect();
            let (forward, backward) = passes.split_at(micro_batches * chunks);
            assert!(forward.iter().all(|pass| *pass == Pass::Forward));
            assert!(backward.len() == forward.len() && backward.iter().all(|pass| *pass == Pass::Backward));
        }
    }
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
