//! What cannot run, or fails, ends with an error that says why.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use burn::tensor::Device;
use burn::train::TrainingStrategy;
use burn_megatron::prelude::*;

use crate::classifier::{Classifier, Trap};
use crate::cpu;
use crate::panics::Panics;
use crate::setup::Setup;

fn error_of(setup: &Setup, strategy: impl Into<TrainingStrategy<Classifier>>) -> String {
    let directory = tempfile::tempdir().unwrap();
    let result = setup.fail_within(5, directory.path(), strategy.into());
    result.error.expect("the training fails").to_string()
}

/// The error of a training that does not start.
fn refused(strategy: MeshStrategy) -> String {
    let setup = Setup::default();
    let text = error_of(&setup, strategy);
    assert_eq!(setup.trap.steps.load(std::sync::atomic::Ordering::SeqCst), 0);
    text
}

fn mesh(layout: &str) -> MeshStrategy {
    MegatronStrategy::mesh(layout.parse().unwrap())
}

#[test]
fn layouts_that_are_not_for_any_module_are_refused() {
    let text = refused(mesh("TP2 PP2 DP2 ZeRO1"));
    assert!(
        text.contains("layout TP2 PP2 DP2 ZeRO1: any module can have") && text.contains("nearest legal: TP2 DP2 ZeRO1")
    );
    says!(refused(mesh("TP2 CP2")), "nearest legal: TP2");
    says!(refused(mesh("DP4 ZeRO3 Group2")), "over all data-parallel ranks", "nearest legal: DP4 ZeRO3");
}

#[test]
fn plans_that_do_not_fit_are_refused() {
    says!(refused(mesh("TP3")), "which 3 ranks of axis tp do not divide");
    let text = refused(mesh("TP2").plan(Plan::auto().columns("haed")));
    says!(text, "pattern `haed` matches no parameter; the nearest is `head.");
    says!(refused(mesh("TP2").plan(Plan::default())), "no parameter is sharded over the 2 ranks of axis tp");
    says!(refused(mesh("TP2").plan(Plan::auto().along(Axis::Dp))), "the plan shards along axis dp; nearest legal: tp");
    let text = refused(mesh("TP2 SP").plan(Plan::default().columns("head")));
    says!(text, "sequence parallelism over the 2 ranks of axis tp begins with an embedding");
}

#[test]
fn devices_and_micro_batches_are_counted() {
    let text = refused(MegatronStrategy::mesh_on("TP2 DP2".parse().unwrap(), vec![Device::flex(); 3]));
    says!(text, "layout TP2 DP2 has 4 ranks, and there are 3 devices; nearest legal: 4");
    assert!(refused(mesh("TP2").micro_batches(0)).contains("nearest legal: 1"));
    let text = refused(mesh("DP2 ZeRO2").reshard_after_forward(false));
    says!(text, "DP2 ZeRO2: only ZeRO 3 gathers parameters; nearest legal: without it");
    says!(refused(mesh("DP2").sync_batch_norm()), "the model has no running statistics");
    let text = refused(mesh("TP2").overlap_grad_reduce());
    says!(text, "no other rank has gradients of the same parameters; nearest legal: without it");
    says!(refused(mesh("DP2 ZeRO3").overlap_grad_reduce()), "by itself; nearest legal: without it");
    says!(refused(mesh("TP2").max_grad_norm(0.0)), "max_grad_norm 0 is not above 0; nearest legal: none");
}

#[test]
fn fewer_items_than_ranks_are_refused() {
    for (items, ranks, nearest) in [(3, 4, "3 data-parallel ranks, or 4 items"), (0, 2, "nearest legal: 2 items")] {
        let strategies = [mesh(&format!("DP{ranks} ZeRO1")).into(), MegatronStrategy::data_parallel(ranks)];
        for strategy in strategies {
            let setup = Setup { items: (0..items).collect(), ..Setup::default() };
            let text = error_of(&setup, strategy);
            assert!(text.contains(&format!("the training set has {items} items")) && text.contains(nearest), "{text}");
        }
    }
}

#[test]
fn a_rank_that_panics_ends_the_training_with_its_error() {
    // With overlap the other rank of DP2 reduces gradients then.
    let meshes = [mesh("TP2"), mesh("TP2 DP2 ZeRO3"), mesh("DP2").overlap_grad_reduce()]
        .map(TrainingStrategy::<Classifier>::from);
    for strategy in meshes.into_iter().chain([MegatronStrategy::data_parallel(4)]) {
        let trap = Trap { panic_at: Some(3), ..Trap::default() };
        says!(error_of(&Setup { trap, ..Setup::default() }, strategy), "the model ran into a wall");
    }
}

#[test]
fn a_training_that_fails_returns_the_model_that_it_began_with() {
    let trap = Trap { panic_at: Some(3), ..Trap::default() };
    let directory = tempfile::tempdir().unwrap();
    let result = Setup { trap, ..Setup::default() }.run(directory.path(), mesh("TP2").into());
    assert!(result.error.is_some());
    let _ = cpu();
    assert_eq!(result.model.numbers(), Classifier::new(0.0, Trap::default()).numbers());
}

#[test]
fn a_metric_that_panics_ends_the_training_with_its_message() {
    // The third is the last iteration of an epoch of two ranks, after which the first waits.
    for layout in ["PP2 DP2", "TP2 PP2 DP2 ZeRO3", "TP2 DP2", "DP2"] {
        let (ended, until) = channel();
        thread::spawn(move || {
            let strategy = match layout.contains("PP") {
                true => mesh(layout).stages().into(),
                false => mesh(layout).into(),
            };
            let directory = tempfile::tempdir().unwrap();
            let (training, learner) = Setup::default().training(directory.path(), strategy);
            let result = training.metric_train(Panics { at: 3 }).launch(learner);
            ended.send(result.error.map(|error| error.to_string())).unwrap();
        });
        let error = until.recv_timeout(Duration::from_secs(60)).expect("the training ends");
        says!(error.expect(layout), "the metric ran into a wall");
    }
}
