//! Pipelines and recomputation under `SupervisedTraining` do what one device does.

use std::sync::atomic::Ordering;

use burn::train::metric::store::Split;
use burn_megatron::prelude::*;

use crate::classifier::{Classifier, Trap};
use crate::cpu;
use crate::setup::{Order, Setup, difference, interleaved};
use crate::training::{mesh, metric, one_device, trains_as};

#[test]
fn pipelines_train_as_one_device_with_accumulation() {
    // A data-parallel rank has batches of 4, 4 and 1 items in an epoch, and the last step takes the one that is left.
    for (layout, schedule) in [
        ("TP1", None),
        ("PP2", None),
        ("PP2", Some(ScheduleKind::GPipe)),
        ("PP4", None),
        ("PP2 VPP2", None),
        ("PP2 DP2 ZeRO1", None),
        ("PP2 DP2 ZeRO2", None),
        ("PP2 VPP2 DP2 ZeRO3", None),
        ("TP2 SP PP2 DP2 ZeRO3", None),
        ("TP2 SP PP2 VPP2 DP2", None),
    ] {
        let ranks = layout.parse::<ParallelLayout>().unwrap().dp;
        let batch = 4 / ranks;
        let setup = || Setup { items: (0..18).collect(), batch, layers: 4, ..Setup::default() };
        let alone = Setup { items: interleaved(18, ranks, batch), batch: 4, accumulation: Some(2), ..setup() };
        let strategy = mesh(layout).micro_batches(2);
        let strategy = schedule.map_or(strategy.clone(), |schedule| strategy.schedule(schedule));
        trains_as(&alone, &setup(), strategy.stages().into(), ranks, layout);
    }
}

#[test]
fn a_stage_whose_parameters_are_all_frozen_hands_gradients_on() {
    let setup = |batch| Setup { batch, layers: 4, frozen: 2, ..Setup::default() };
    let alone = |ranks, frozen| {
        let items = interleaved(18, ranks, 4 / ranks);
        Setup { items, accumulation: Some(2), frozen, ..setup(4) }.numbers(one_device())
    };
    assert!(difference(&alone(1, 0), &alone(1, 2)) > 1e-3, "nothing is frozen");
    for layout in ["TP1", "PP2", "PP4", "PP2 VPP2", "PP2 DP2 ZeRO1", "PP2 DP2 ZeRO2", "PP2 DP2 ZeRO3", "TP2 PP2"] {
        let ranks = layout.parse::<ParallelLayout>().unwrap().dp;
        let single = alone(ranks, 2);
        for recompute in [Recompute::default(), Recompute::full()] {
            let strategy = mesh(layout).micro_batches(2).recompute(recompute).max_grad_norm(1e9);
            let gap = difference(&setup(4 / ranks).numbers(strategy.stages().into()), &single);
            assert!(gap < 1e-10, "{layout}: {gap}");
        }
    }
}

#[test]
fn gradients_reduced_during_the_last_micro_batch_train_as_those_reduced_after_it() {
    for layout in ["PP2 DP2", "PP2 VPP2 DP2 ZeRO1", "PP2 DP2 ZeRO2", "TP2 SP PP2 DP2 ZeRO1", "DP2"] {
        // The last step of an epoch has one micro-batch.
        let setup = || Setup { items: (0..20).collect(), batch: 2, layers: 4, ..Setup::default() };
        for recompute in [Recompute::default(), Recompute::full()] {
            let usual = || mesh(layout).micro_batches(4).recompute(recompute.clone()).max_grad_norm(0.05);
            let after = setup().numbers(usual().stages().into());
            let during = setup().numbers(usual().overlap_grad_reduce().bucket_size(1000).stages().into());
            let gap = difference(&during, &after);
            assert!(gap < 1e-10, "{layout}: {gap}");
        }
    }
}

#[test]
fn zero_changes_no_bit_of_a_pipeline_with_one_micro_batch() {
    let run = |layout: &str| Setup { layers: 4, ..Setup::default() }.numbers(mesh(layout).stages().into());
    for layout in ["PP2 DP2", "TP2 PP2 DP2"] {
        let plain = run(layout);
        for zero in 1..=3 {
            assert_eq!(run(&format!("{layout} ZeRO{zero}")), plain, "{layout}, ZeRO {zero}");
        }
    }
}

#[test]
fn dropout_is_the_same_in_every_pipeline_and_with_recomputation() {
    let run = |strategy: MeshStrategy| {
        let setup = Setup { dropout: 0.2, seed: Some(5), layers: 4, ..Setup::default() };
        setup.numbers(strategy.micro_batches(2).stages().into())
    };
    let one = run(mesh("TP1"));
    let without = Setup { layers: 4, ..Setup::default() }.numbers(mesh("TP1").micro_batches(2).stages().into());
    assert!(difference(&one, &without) > 1e-4);
    assert_eq!(run(mesh("TP1").recompute(Recompute::full())), one);
    for layout in ["PP2", "PP2 VPP2"] {
        assert_eq!(run(mesh(layout)), one, "{layout}");
        assert_eq!(run(mesh(layout).recompute(Recompute::full())), one, "{layout}, recomputed");
    }
    let two = run(mesh("PP2 DP2"));
    for strategy in [mesh("PP2 DP2 ZeRO3"), mesh("PP2 VPP2 DP2 ZeRO3").recompute(Recompute::full())] {
        let gap = difference(&run(strategy), &two);
        assert!(gap < 1e-10, "ZeRO 3: {gap}");
    }
    let gap = difference(&run(mesh("TP2 SP PP2").recompute(Recompute::full())), &one);
    assert!(gap < 1e-10, "{gap}");
}

#[test]
fn batches_of_several_workers_are_read_once_for_all_stages() {
    // Their order is that of time; a last stage with other batches would compare outputs with other items' classes.
    let order = Order { shuffle: true, workers: 2 };
    let setup = Setup { order, items: (0..64).collect(), epochs: 12, ..Setup::default() };
    let directory = tempfile::tempdir().unwrap();
    assert!(setup.run(directory.path(), mesh("PP2").stages().into()).error.is_none());
    let mean = |epoch| {
        let losses = metric(directory.path(), "Loss", epoch, Split::Train);
        losses.iter().sum::<f64>() / losses.len() as f64
    };
    assert!(mean(12) < 0.9 * mean(1), "{} after {}", mean(12), mean(1));
}

#[test]
fn checkpoints_are_those_of_one_device_and_resume_in_any_pipeline() {
    let setup = |epochs, resume| Setup { epochs, checkpoints: Some(resume), ..Setup::default() };
    let uninterrupted = Setup { epochs: 4, ..Setup::default() }.numbers(mesh("DP2").into());
    let strategy = |layout: &str| match layout.contains("PP") {
        true => mesh(layout).stages().into(),
        false => mesh(layout).into(),
    };
    for (before, after) in [
        ("PP2 DP2", "PP2 DP2"),
        ("PP2 DP2 ZeRO1", "DP2"),
        ("TP2 DP2 ZeRO1", "TP2 PP2 DP2 ZeRO2"),
        ("PP2 DP2 ZeRO3", "PP2 DP2"),
        ("PP2 DP2 ZeRO1", "PP2 DP2 ZeRO3"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let half = setup(2, None).run(directory.path(), strategy(before));
        assert!(half.error.is_none(), "{}", half.error.unwrap());
        let resumed = setup(4, Some(2)).run(directory.path(), strategy(after));
        assert!(resumed.error.is_none(), "{}", resumed.error.unwrap());
        let gap = difference(&resumed.model.numbers(), &uninterrupted);
        assert!(gap < 1e-10, "{before}, then {after}: {gap}");
    }
}

/// The error of a training, and the steps that it took.
fn error_of(setup: Setup, strategy: StagesStrategy) -> (String, usize) {
    let directory = tempfile::tempdir().unwrap();
    let result = setup.fail_within(10, directory.path(), strategy.into());
    assert_eq!(result.model.numbers(), Classifier::deep(setup.layers, 0.0, Trap::default()).numbers());
    (result.error.expect("the training fails").to_string(), setup.trap.steps.load(Ordering::SeqCst))
}

#[test]
fn a_stage_that_panics_ends_the_training_with_its_error() {
    for layout in ["PP2", "TP2 PP2 DP2 ZeRO1", "PP2 DP2 ZeRO3"] {
        let trap = Trap { panic_at: Some(3), ..Trap::default() };
        let (text, _) = error_of(Setup { trap, ..Setup::default() }, mesh(layout).stages());
        assert!(text.contains("the model ran into a wall"), "{layout}: {text}");
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_starts() {
    for (strategy, expected) in [
        (mesh("PP4"), "4 stages of a model with 2 blocks; nearest legal: pipeline-parallel 2"),
        (mesh("PP2 ZeRO3"), "nearest legal: PP2"),
        (mesh("PP2").overlap_grad_reduce(), "no other rank has gradients of the same parameters"),
        (mesh("PP2").schedule(ScheduleKind::ZbH1), "nearest legal: 1f1b"),
        (mesh("PP2").micro_batches(0), "micro_batches 0: a step takes at least 1 batch; nearest legal: 1"),
        (MegatronStrategy::mesh_on("PP2".parse().unwrap(), vec![cpu(); 3]), "nearest legal: 2"),
        (mesh("TP3 PP2"), "which 3 ranks of axis tp do not divide"),
    ] {
        let (text, steps) = error_of(Setup::default(), strategy.stages());
        assert!(text.contains(expected) && steps == 0, "{text}");
    }
    let deep = || Setup { layers: 4, ..Setup::default() };
    let (text, steps) = error_of(deep(), mesh("PP2 VPP2").micro_batches(3).stages());
    assert!(text.contains("with 3 micro-batches") && steps == 0, "{text}");
    for (strategy, expected) in [
        (mesh("TP1").recompute(Recompute::full()), "recompute: blocks are those of a model that implements `Stages`"),
        (mesh("TP1").schedule(ScheduleKind::GPipe), "schedule gpipe: blocks are those of a model"),
        (mesh("PP2"), "one that implements `Stages` pipelines; nearest legal: TP1"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        says!(Setup::default().run(directory.path(), strategy.into()).error.unwrap(), expected);
    }
}
