//! A run of one process whose ranks fail continues with the bits of one that was left alone.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn::train::Interrupter;

use super::*;

/// Which faults, copies and checkpoints, and the steps that the run resumes from.
struct Case {
    layout: &'static str,
    faults: &'static str,
    copy_every: Option<u64>,
    save_every: Option<u64>,
    resumed: &'static [u64],
}

fn failing(case: &Case, max_restarts: usize, folder: &Path) -> Pretraining<Llama> {
    let run = run(case.layout, &folder.join("run")).inject(case.faults.parse().unwrap());
    let run = run.restarts(RestartOptions { max_restarts, copy_every: case.copy_every, ..RestartOptions::default() });
    match case.save_every {
        None => run,
        every => run.checkpoints(saving(folder, every, true)),
    }
}

/// Loss, gradient norm and learning rate of the steps after this one, as they were written.
pub(super) fn steps(folder: &Path, after: u64) -> Vec<[serde_json::Value; 4]> {
    let lines = trained_after(folder, after);
    lines.iter().map(|line| ["step", "loss", "grad_norm", "lr"].map(|key| line[key].clone())).collect()
}

#[test]
fn a_run_whose_ranks_fail_ends_with_the_bits_of_one_that_was_left_alone() {
    for case in [
        Case {
            layout: "TP2 SP DP2 ZeRO1",
            faults: "error:rank3@step7,panic:rank0@step11",
            copy_every: Some(3),
            save_every: None,
            resumed: &[6, 9],
        },
        Case { layout: "PP2 DP2", faults: "panic:rank1@step4", copy_every: Some(1), save_every: None, resumed: &[3] },
        Case { layout: "DP2 ZeRO3", faults: "error:rank1@step9", copy_every: None, save_every: Some(4), resumed: &[8] },
        // The checkpoint is newer than the copy, and after the first restart it is the other way around.
        Case {
            layout: "DP4 ZeRO2",
            faults: "error:rank2@step11,error:rank3@step12",
            copy_every: Some(11),
            save_every: Some(9),
            resumed: &[9, 11],
        },
        Case { layout: "TP2", faults: "error:rank0@step3", copy_every: None, save_every: None, resumed: &[] },
    ] {
        let [alone, failed] = std::array::from_fn(|_| tempfile::tempdir().unwrap());
        let (layout, restarts) = (case.layout, case.faults.split(',').count());
        let left_alone = run(layout, &alone.path().join("run")).finish(global_weights);
        succeeds(&left_alone, layout);
        let run = failing(&case, restarts, failed.path()).finish(global_weights);
        succeeds(&run, layout);
        assert_eq!(run.finished(), left_alone.finished(), "{layout}");
        assert_eq!(steps(failed.path(), 0), steps(alone.path(), 0), "{layout}: each step once");
        let lines = log(&failed.path().join("run"));
        let resumed = lines.iter().filter(|line| line["kind"] == "resumed").map(|line| line["step"].as_u64().unwrap());
        assert_eq!(resumed.collect::<Vec<_>>(), case.resumed, "{layout}");
    }
}

#[test]
fn a_failure_that_repeats_or_comes_once_too_often_ends_the_run() {
    for (faults, restarts, why) in [
        ("error:rank1@step3,error:rank1@step3", 5, "no restart: step 3 has failed in the same way before"),
        ("error:rank1@step3,panic:rank0@step5", 1, "no restart is left of 1"),
        ("error:rank1@step3", 0, "rank 1 (dp 1) failed: fault error:rank1@step3 of --inject"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let case = Case { layout: "DP2", faults, copy_every: Some(2), save_every: None, resumed: &[] };
        says!(launch(&failing(&case, restarts, folder.path())).error.expect(faults), why);
    }
}

#[test]
fn a_run_that_begins_again_goes_on_with_its_trace_and_its_run_of_weights_and_biases() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let faults = "error:rank1@step5,error:rank0@step9";
    let case = Case { layout: "DP2", faults, copy_every: Some(3), save_every: None, resumed: &[] };
    let (trace, wandb) = (Some(folder.join("trace.json")), Some(folder.join("board")));
    let run = failing(&case, 2, folder).logs(LogOptions { trace, wandb, ..LogOptions::default() });
    succeeds(&run, faults);
    for rank in 0..2 {
        assert_eq!(logs::traced(&folder.join("trace.json"), rank).1, [3, 4, 5].into());
    }
    let runs: Vec<_> = std::fs::read_dir(folder.join("board/wandb")).unwrap().map(|run| run.unwrap().path()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    let files = std::fs::read_dir(&runs[0]).unwrap().map(|file| file.unwrap().path());
    let file = files.into_iter().find(|file| file.extension().is_some_and(|end| end == "wandb")).unwrap();
    let bytes = std::fs::read(file).unwrap();
    // Once in the summary, once in the history.
    let losses = bytes.windows(b"train/loss".len()).filter(|window| window == b"train/loss").count();
    assert_eq!(losses, 2 * 12, "each step once");
}

/// After a restart from a copy in memory, no checkpoint has the step that the run stands at.
#[test]
fn a_run_that_began_again_from_memory_saves_where_it_ends() {
    let restarts = RestartOptions { max_restarts: 1, copy_every: Some(2), ..RestartOptions::default() };
    let saved = |folder: &Path| Checkpoint::open(folder.join("checkpoints")).unwrap().state().step;
    // It is asked to stop while it begins again, from step 6.
    let folder = tempfile::tempdir().unwrap();
    let (interrupter, built) = (Interrupter::new(), AtomicUsize::new(0));
    let (stop, build) = (interrupter.clone(), builder::<Llama>(&llama(), FloatDType::F32));
    let stops = move |rank: &Rank, part| {
        if built.fetch_add(1, Ordering::Relaxed) == 1 {
            stop.stop(Some("stopped in a restart"));
        }
        build(rank, part)
    };
    let run = resume::run_with("TP1", folder.path(), None, data(900, 1), stops);
    let run = run.restarts(restarts).inject("error:rank0@step7".parse().unwrap());
    let (training, learner) = run.supervised();
    let result = training.with_application_logger(None).with_interrupter(interrupter).launch(learner);
    assert!(result.error.is_none(), "{:?}", result.error);
    assert_eq!(result.interrupted.unwrap().reason.as_deref(), Some("stopped in a restart"));
    assert_eq!(saved(folder.path()), 6);

    // The third evaluation, which follows on the last step, fails once.
    let folder = tempfile::tempdir().unwrap();
    let reads = AtomicUsize::new(0);
    let fails = move |index: usize, sample| {
        assert!(index > 0 || reads.fetch_add(1, Ordering::Relaxed) != 2, "the data cannot be read");
        sample
    };
    let (mesh, held_out) = (Mesh::new("TP1".parse().unwrap()).unwrap(), Arc::new(Through(data(200, 2), fails)));
    let build = builder::<Llama>(&llama(), FloatDType::F32);
    let run = Pretraining::<Llama>::new(mesh, engine(), 12, (data(900, 1), held_out), llama().dims(), build)
        .evaluate(5, 2)
        .directory(folder.path().join("run"))
        .checkpoints(saving(folder.path(), SaveEvery::Never, true))
        .restarts(restarts);
    succeeds(&run, "an evaluation that failed once");
    assert_eq!(saved(folder.path()), 12);
    let resumed = log(&folder.path().join("run")).iter().filter(|line| line["kind"] == "resumed").count();
    assert_eq!(resumed, 1);
}
