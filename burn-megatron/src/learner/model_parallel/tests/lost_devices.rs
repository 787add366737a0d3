//! A run that loses a device continues with fewer data-parallel ranks, as if it had been stopped and resumed with them.

use super::restarts::steps;
use super::*;

/// A layout, what goes wrong, the layout that continues and from which step.
struct Case {
    layout: &'static str,
    global_batch: usize,
    faults: &'static str,
    copy_every: Option<u64>,
    save_every: Option<u64>,
    smaller: &'static str,
    from: u64,
}

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
    for case in [
        // Three ranks do not divide a batch of 8 in micro-batches of 2.
        Case {
            layout: "DP4",
            global_batch: 8,
            faults: "lost:rank3@step7",
            copy_every: Some(3),
            save_every: None,
            smaller: "DP2",
            from: 6,
        },
        Case {
            layout: "DP4 ZeRO1",
            global_batch: 24,
            faults: "lost:rank0@step7",
            copy_every: Some(3),
            save_every: None,
            smaller: "DP3 ZeRO1",
            from: 6,
        },
        Case {
            layout: "TP2 SP DP2 ZeRO1",
            global_batch: 8,
            faults: "lost:rank1@step6",
            copy_every: Some(5),
            save_every: None,
            smaller: "TP2 SP ZeRO1",
            from: 5,
        },
        // From the disk, and twice.
        Case {
            layout: "DP4 ZeRO3",
            global_batch: 8,
            faults: "lost:rank2@step6,lost:rank1@step8",
            copy_every: None,
            save_every: Some(5),
            smaller: "DP2 ZeRO3",
            from: 5,
        },
        Case {
            layout: "PP2 DP2 ZeRO3",
            global_batch: 8,
            faults: "lost:rank3@step4",
            copy_every: Some(1),
            save_every: None,
            smaller: "PP2 ZeRO3",
            from: 3,
        },
    ] {
        let [failed, stopped, resumed] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let Case { layout, global_batch, smaller, from, .. } = case;
        let whole = run(layout, global_batch, stopped.path(), Some(1));
        succeeds(&whole, layout);
        let at = saved_at(stopped.path(), from);
        let oracle = run(smaller, global_batch, resumed.path(), None).resume(Resume::From(at)).finish(global_weights);
        succeeds(&oracle, layout);

        let restarts = RestartOptions { max_restarts: 2, copy_every: case.copy_every, min_data_parallel: Some(1) };
        let run = run(layout, global_batch, failed.path(), case.save_every);
        let run = run.inject(case.faults.parse().unwrap()).restarts(restarts).finish(global_weights);
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
