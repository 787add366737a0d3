//! Trainings on a mesh do what they do on one device.

use std::path::Path;
use std::sync::atomic::Ordering;

use burn::module::Module;
use burn::tensor::Device;
use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::LossMetric;
use burn::train::metric::store::{Aggregate, Direction, Split};
use burn::train::{ExecutionStrategy, MetricEarlyStoppingStrategy, StoppingCondition, TrainingStrategy};
use burn_megatron::prelude::*;

use crate::classifier::{Classifier, Trap, generator};
use crate::cpu;
use crate::setup::{Order, Setup, difference, interleaved};

/// Small parameters are sharded too.
pub fn mesh(layout: &str) -> MeshStrategy {
    MegatronStrategy::mesh(layout.parse().unwrap()).units(Units::auto().keep_below(2))
}

pub fn one_device() -> TrainingStrategy<Classifier> {
    ExecutionStrategy::single(cpu()).into()
}

pub fn metric(directory: &Path, name: &str, epoch: usize, split: Split) -> Vec<f64> {
    let mut logger = FileMetricLogger::new(directory);
    let entries = logger.read_numeric(name, epoch, &split).unwrap();
    entries.iter().filter(|entry| !entry.serialize().ends_with("final")).map(|entry| entry.current()).collect()
}

/// Batches of the validation set that `readers` ranks read together.
pub fn validation_batches(readers: usize) -> usize {
    (0..readers).map(|i| ((i + 1) * 10 / readers - i * 10 / readers).div_ceil(4)).sum()
}

/// A training over `ranks` data-parallel ranks ends with the numbers of one on one device, and has its metrics.
pub fn trains_as(alone: &Setup, setup: &Setup, strategy: TrainingStrategy<Classifier>, ranks: usize, what: &str) {
    let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let single = alone.run(one.path(), one_device()).model.numbers();
    let result = setup.run(many.path(), strategy);
    assert!(result.error.is_none() && result.interrupted.is_none(), "{what}: {:?}", result.error);
    assert_eq!(result.model.devices(), [cpu()], "{what}");
    let found = result.model.numbers();
    let start = Classifier::deep(setup.layers, 0.0, Trap::default()).numbers();
    assert!(difference(&single, &start) > 1e-2, "the single device did not learn");
    assert!(difference(&found, &single) < 1e-10, "{what}: {}", difference(&found, &single));
    let losses = (1..=setup.epochs).map(|epoch| (epoch, "Loss"));
    for (epoch, name) in losses.chain([(1, "Learning Rate"), (setup.epochs, "Accuracy")]) {
        let single = metric(one.path(), name, epoch, Split::Train);
        let steps = metric(many.path(), name, epoch, Split::Train);
        let steps: Vec<f64> = steps.chunks(ranks).map(|step| step.iter().sum::<f64>() / ranks as f64).collect();
        // Rounding of the steps before is larger in the loss of a batch than in the parameters: 6e-10 on an AMD EPYC.
        assert!(difference(&steps, &single) < 1e-8, "{what}, {name} of epoch {epoch}: {steps:?} {single:?}");
    }
    let valid = |directory: &Path| metric(directory, "Loss", setup.epochs, Split::Valid);
    assert_eq!(valid(many.path()).len(), validation_batches(ranks), "{what}: ranks validate their shares of 10 items");
    if ranks == 1 {
        assert!(difference(&valid(many.path()), &valid(one.path())) < 1e-10, "{what}");
    }
}

#[test]
fn layouts_train_as_one_device_with_the_larger_batch() {
    let layouts =
        ["TP2", "TP4", "TP2 SP", "TP2 DP2", "TP2 SP DP2 ZeRO1", "TP2 DP2 ZeRO2", "TP2 DP2 ZeRO3", "DP2 ZeRO1"];
    for layout in layouts {
        let ranks = layout.parse::<ParallelLayout>().unwrap().dp;
        let alone = Setup { items: interleaved(18, ranks, 4), batch: 4 * ranks, ..Setup::default() };
        trains_as(&alone, &Setup::default(), mesh(layout).into(), ranks, layout);
    }
}

#[test]
fn data_parallel_ranks_train_as_one_device_with_the_larger_batch() {
    for (ranks, accumulation) in [(2, None), (3, None), (2, Some(2)), (4, Some(3))] {
        // 61 items: a remainder that no rank sees, and a last batch that is not full.
        let setup = || Setup { items: (0..61).collect(), epochs: 3, accumulation, ..Setup::default() };
        let alone = Setup { items: interleaved(61, ranks, 4), batch: 4 * ranks, ..setup() };
        trains_as(&alone, &setup(), MegatronStrategy::data_parallel(ranks), ranks, &format!("{ranks} ranks"));
    }
}

/// Their gradients are sums over tensor-parallel ranks before they are means over data-parallel ones.
#[test]
fn small_parameters_that_stay_whole_train_as_on_one_device() {
    let alone = Setup { items: interleaved(18, 2, 4), batch: 8, ..Setup::default() };
    let strategy = MegatronStrategy::mesh("TP2 SP DP2 ZeRO3".parse().unwrap()).units(Units::auto().keep_below(100));
    let gap = difference(&Setup::default().numbers(strategy.into()), &alone.numbers(one_device()));
    assert!(gap < 1e-10, "{gap}");
}

#[test]
fn parameters_that_stay_gathered_train_as_those_gathered_twice() {
    for layout in ["DP2 ZeRO3", "TP2 SP DP2 ZeRO3"] {
        let strategy = || mesh(layout).micro_batches(2).max_grad_norm(0.05);
        let kept = Setup::default().numbers(strategy().reshard_after_forward(false).into());
        let gap = difference(&kept, &Setup::default().numbers(strategy().into()));
        assert!(gap < 1e-10, "{layout}: {gap}");
    }
}

#[test]
fn micro_batches_add_up_to_one_step() {
    for layout in ["TP2", "TP2 SP DP2 ZeRO2"] {
        let ranks = layout.parse::<ParallelLayout>().unwrap().dp;
        let batch = 4 / ranks;
        let alone = Setup { items: interleaved(32, ranks, batch), accumulation: Some(2), ..Setup::default() };
        let setup = || Setup { items: (0..32).collect(), batch, ..Setup::default() };
        let found = setup().numbers(mesh(layout).micro_batches(2).into());
        let gap = difference(&found, &alone.numbers(one_device()));
        assert!(gap < 1e-10, "{layout}: {gap}");
        assert!(difference(&found, &setup().numbers(mesh(layout).into())) > 1e-4, "{layout}");
    }
}

#[test]
fn gradients_reduced_during_the_backward_pass_train_as_those_reduced_after_it() {
    for layout in ["DP2", "DP4 ZeRO1", "DP2 ZeRO2", "TP2 DP2", "TP2 SP DP2 ZeRO1", "TP2 DP2 ZeRO2"] {
        let batch = 4 / layout.parse::<ParallelLayout>().unwrap().dp;
        // The last step of an epoch has one micro-batch, which nobody knows to be the last.
        let setup = || Setup { items: (0..20).collect(), batch, epochs: 4, ..Setup::default() };
        let usual = || mesh(layout).micro_batches(2).max_grad_norm(0.05);
        let after = setup().numbers(usual().into());
        let gap = difference(&setup().numbers(usual().overlap_grad_reduce().into()), &after);
        assert!(gap < 1e-10, "{layout}: {gap}");
        let directory = tempfile::tempdir().unwrap();
        let half = Setup { epochs: 2, checkpoints: Some(None), ..setup() };
        assert!(half.run(directory.path(), usual().overlap_grad_reduce().into()).error.is_none());
        let rest = Setup { checkpoints: Some(Some(2)), ..setup() };
        let resumed = rest.run(directory.path(), usual().overlap_grad_reduce().into());
        assert!(resumed.error.is_none(), "{}", resumed.error.unwrap());
        let gap = difference(&resumed.model.numbers(), &after);
        assert!(gap < 1e-10, "{layout}, resumed: {gap}");
    }
}

#[test]
fn gradient_checkpointing_of_the_users_device_reaches_all_ranks() {
    let layouts = "TP2, TP2 SP DP2 ZeRO1, DP2 ZeRO2, TP2 DP2 ZeRO3, PP2, PP2 VPP2 DP2 ZeRO2, PP2 DP2 ZeRO3, TP2 SP PP2";
    for layout in layouts.split(", ").chain(["PP2 recomputed"]) {
        let recompute = layout.contains("recomputed");
        let (layout, stages) = (layout.trim_end_matches(" recomputed"), layout.contains("PP2"));
        let ranks = layout.parse::<ParallelLayout>().unwrap().world_size();
        let setup = || Setup { dropout: 0.1, seed: Some(5), norm: !recompute, layers: 4, ..Setup::default() };
        let run = |device: Device| {
            let setup = setup();
            let checkpointed = setup.trap.checkpointed.clone();
            let strategy = mesh(layout).seeded().reshard_after_forward(!layout.contains("ZeRO3"));
            let strategy = strategy.devices(vec![device; ranks]);
            let strategy = if recompute { strategy.recompute(Recompute::full()) } else { strategy };
            let strategy = if stages { strategy.micro_batches(2).stages().into() } else { strategy.into() };
            (setup.numbers(strategy), checkpointed.load(Ordering::SeqCst))
        };
        let (plain, none) = run(cpu());
        let (checkpointed, steps) = run(cpu().autodiff().gradient_checkpointing());
        assert!(none == 0 && steps > 0, "{layout}: {none} and {steps} steps have gradient checkpointing");
        let gap = difference(&checkpointed, &plain);
        assert!(gap < 1e-12, "{layout}: {gap}");
    }
}

#[test]
fn shuffled_items_and_workers_are_read_once_for_all_ranks_of_a_team() {
    // With one rank for data the order is that of one device.
    let order = Order { shuffle: true, workers: 0 };
    let alone = Setup { order, ..Setup::default() };
    // burn-train's single strategy does not take a share of the loader, which draws from its generator.
    let single = alone.numbers(MegatronStrategy::data_parallel(1));
    assert!(difference(&alone.numbers(mesh("TP2").into()), &single) < 1e-10);
    assert!(difference(&Setup::default().numbers(mesh("TP2").into()), &single) > 1e-6);
    // The order of batches of several workers is that of time.
    let order = Order { shuffle: true, workers: 2 };
    let trained = Setup { order, ..Setup::default() }.numbers(mesh("TP2 DP2 ZeRO1").into());
    assert!(trained.iter().all(|value| value.is_finite()));
}

#[test]
fn checkpoints_are_those_of_one_device_and_resume_in_any_layout() {
    let uninterrupted = Setup { epochs: 4, ..Setup::default() }.numbers(mesh("DP2").into());
    for (before, after) in [
        ("TP2 DP2", "TP2 DP2"),
        ("TP2 DP2 ZeRO1", "DP2"),
        ("DP2", "TP2 SP DP2 ZeRO3"),
        ("TP2 DP2 ZeRO3", "TP4 DP2 ZeRO2"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let half = Setup { epochs: 2, checkpoints: Some(None), ..Setup::default() };
        assert!(half.run(directory.path(), mesh(before).into()).error.is_none());
        let rest = Setup { epochs: 4, checkpoints: Some(Some(2)), ..Setup::default() };
        let resumed = rest.run(directory.path(), mesh(after).into());
        assert!(resumed.error.is_none(), "{}", resumed.error.unwrap());
        let found = resumed.model.numbers();
        // burn-train restores the optimizer's state in the default type, f64 here.
        assert!(difference(&found, &uninterrupted) < 1e-10, "{before}, then {after}");
    }
}

/// There the learner of each rank has the model.
#[test]
fn a_model_with_frozen_layers_resumes_on_logical_devices() {
    let setup =
        |epochs, checkpoints| Setup { epochs, checkpoints, frozen: 1, dropout: 0.2, seed: Some(5), ..Setup::default() };
    let seeded = || mesh("DP2").seeded();
    let whole = setup(4, None).numbers(seeded().into());
    let one = Setup { frozen: 1, dropout: 0.2, seed: Some(5), epochs: 4, ..Setup::default() }
        .numbers(mesh("DP2 ZeRO1").seeded().into());
    assert!(difference(&whole, &one) < 1e-12);
    for after in [seeded(), mesh("DP2 ZeRO1").seeded()] {
        let directory = tempfile::tempdir().unwrap();
        assert!(setup(2, Some(None)).run(directory.path(), seeded().into()).error.is_none());
        let resumed = setup(4, Some(Some(2))).run(directory.path(), after.into());
        assert!(resumed.error.is_none(), "{}", resumed.error.unwrap());
        assert!(difference(&resumed.model.numbers(), &whole) < 1e-12);
    }
}

#[test]
fn the_trained_model_and_its_record_need_no_mesh() {
    let setup = Setup::default();
    let directory = tempfile::tempdir().unwrap();
    let model = setup.run(directory.path(), mesh("TP2").into()).model;
    assert_eq!(model.devices(), [cpu()]);
    let loaded = Classifier::new(0.0, Trap::default()).load_record(model.clone().into_record());
    assert_eq!(loaded.numbers(), model.numbers());
}

#[test]
fn dropout_is_the_same_in_every_tensor_parallel_layout() {
    let setup = || Setup { epochs: 3, dropout: 0.2, seed: Some(5), ..Setup::default() };
    let run = |layout: &str| setup().numbers(mesh(layout).into());
    let two = run("TP2");
    assert!(difference(&two, &Setup { epochs: 3, ..Setup::default() }.numbers(mesh("TP2").into())) > 1e-4);
    for layout in ["TP4", "TP2 SP"] {
        let gap = difference(&run(layout), &two);
        assert!(gap < 1e-10, "{layout}: {gap}");
    }
}

#[test]
fn a_resumed_run_drops_what_the_whole_one_does() {
    for drawn_late in [false, true] {
        for strategy in [|| mesh("TP2").into(), || mesh("PP2").micro_batches(2).stages().into()] {
            let setup = |epochs, resume| Setup {
                epochs,
                dropout: 0.2,
                seed: Some(5),
                checkpoints: Some(resume),
                drawn_late,
                ..Setup::default()
            };
            let directory = tempfile::tempdir().unwrap();
            let [whole, _, resumed] = [(3, None), (2, None), (3, Some(2))]
                .map(|(epochs, resume)| setup(epochs, resume).run(directory.path(), strategy()))
                .map(|result| result.model.numbers());
            let gap = difference(&resumed, &whole);
            assert!(gap < 1e-10, "drawn late {drawn_late}: {gap}");
        }
    }
}

#[test]
fn the_interrupter_stops_all_ranks_and_stages_after_the_step() {
    for strategy in [MegatronStrategy::data_parallel(2), mesh("TP2 DP2").into(), mesh("PP2 DP2").stages().into()] {
        let trap = Trap { stop_at: Some(3), ..Trap::default() };
        let steps = trap.steps.clone();
        let directory = tempfile::tempdir().unwrap();
        let result = Setup { trap, ..Setup::default() }.run(directory.path(), strategy);
        assert_eq!(result.interrupted.unwrap().reason.as_deref(), Some("enough"));
        assert!(result.error.is_none());
        assert_eq!(steps.load(Ordering::SeqCst), 4, "step 2 of both data-parallel ranks is the last");
    }
}

#[test]
fn early_stopping_ends_all_ranks_in_the_same_epoch() {
    // Two training steps an epoch, of one rank or of each of two.
    for strategy in [mesh("TP2").into(), MegatronStrategy::data_parallel(2)] {
        let setup = Setup { epochs: 20, items: (0..8).collect(), ..Setup::default() };
        let steps = setup.trap.steps.clone();
        // A loss that falls counts as 'no improvement' when the highest is wanted: epoch 1 stays the best.
        let never_better = MetricEarlyStoppingStrategy::new(
            &LossMetric::new(),
            Aggregate::Mean,
            Direction::Highest,
            Split::Train,
            StoppingCondition::NoImprovementSince { n_epochs: 2 },
        );
        let directory = tempfile::tempdir().unwrap();
        let (training, learner) = setup.training(directory.path(), strategy);
        let _generator = generator();
        training.early_stopping(never_better).launch(learner);
        let epochs = steps.load(Ordering::SeqCst) / 2;
        assert!((3..8).contains(&epochs), "{epochs} epochs");
    }
}
