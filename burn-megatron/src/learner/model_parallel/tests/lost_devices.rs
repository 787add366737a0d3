//! A run that loses a device continues with fewer data-parallel ranks, as if it had been stopped and resumed with them.

use super::restarts::steps;
use super::*;

fn run(layout: &str, global_batch: usize, folder: &Path, save_every: Option<u64>) -> Pretraining<Llama> {
    let layout = layout.parse::<ParallelLayout>().unwrap();
    let description = Description { config: serde_json::json!({ "parallel": layout }), ..Description::default() };
    let (engine, data) = (EngineConfig { global_batch, ..engine() }, (data(2400, 1), data(200, 2)));
    let (mesh, build) = (Mesh::new(layout).unwrap(), builder(&llama(), FloatDType::F64));
    Pretraining::new(mesh, engine, 12, data, llama().dims(), build)
        .evaluate(5, 2)
        .directory(folder.join("run"))
        .checkpoints(saving(folder, save_every, true))
        .describe(description)
}

#[test]
fn a_run_that_loses_a_device_equals_one_that_was_stopped_and_resumed_with_fewer_ranks() {
    // A layout, its batch, what goes wrong, steps between copies and between checkpoints, the layout that continues and
    // from which step.
    for (layout, global_batch, faults, copy_every, save_every, smaller, from) in [
        // Three ranks do not divide a batch of 8 in micro-batches of 2.
        ("DP4", 8, "lost:rank3@step7", Some(3), None, "DP2", 6),
        ("DP4 ZeRO1", 24, "lost:rank0@step7", Some(3), None, "DP3 ZeRO1", 6),
        ("TP2 SP DP2 ZeRO1", 8, "lost:rank1@step6", Some(5), None, "TP2 SP ZeRO1", 5),
        // From the disk, and twice.
        ("DP4 ZeRO3", 8, "lost:rank2@step6,lost:rank1@step8", None, Some(5), "DP2 ZeRO3", 5),
        ("PP2 DP2 ZeRO3", 8, "lost:rank3@step4", Some(1), None, "PP2 ZeRO3", 3),
    ] {
        let [failed, stopped, resumed] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let whole = run(layout, global_batch, stopped.path(), Some(1));
        succeeds(&whole, layout);
        let at = saved_at(stopped.path(), from);
        let oracle = run(smaller, global_batch, resumed.path(), None).resume(Resume::From(at)).finish(global_weights);
        succeeds(&oracle, layout);

        let restarts = RestartOptions { max_restarts: 2, copy_every, min_data_parallel: Some(1) };
        let run = run(layout, global_batch, failed.path(), save_every);
        let run = run.inject(faults.parse().unwrap()).restarts(restarts).finish(global_weights);
        succeeds(&run, layout);
        assert_eq!(steps(failed.path(), from), steps(resumed.path(), from), "{layout}");
        assert_eq!(run.finished(), oracle.finished(), "{layout}");
        let last = Checkpoint::open(failed.path().join("checkpoints")).unwrap();
        let expected: ParallelLayout = smaller.parse().unwrap();
        assert_eq!((last.state().step, &last.state().layout), (12, &expected));
        assert_eq!(last.state().config["parallel"], serde_json::to_value(expected).unwrap());
    }
}

#[test]
fn a_device_that_the_run_cannot_do_without_ends_it_and_says_what_it_may_do() {
    for (layout, least, why) in [
        ("DP2", None, "the device of rank 1 is lost: no restart with training.min-data-parallel = none"),
        (
            "DP2",
            Some(2),
            "the device of rank 1 is lost: no restart, because with 1 of 2 devices training.min-data-parallel = 2 does not run; \
             nearest legal: 1",
        ),
        ("TP2", Some(1), "with 1 of 2 devices training.min-data-parallel = 1 does not run; nearest legal: none"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let restarts = RestartOptions { max_restarts: 3, copy_every: None, min_data_parallel: least };
        let run = run(layout, 8, folder.path(), None).inject("lost:rank1@step3".parse().unwrap()).restarts(restarts);
        says!(launch(&run).error.expect(layout), why);
    }
}
