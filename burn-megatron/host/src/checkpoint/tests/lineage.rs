//! A run that began at an older checkpoint, in the folder of the one that was given up for it.

use std::path::Path;

use super::super::{Checkpoint, FolderStorage, RunState, Saver, SaverOptions, stored_steps};
use super::round_trip::{slices, state};
use super::storage::{folders, save, saver};

fn there(root: &Path) -> Vec<u64> {
    Checkpoint::list(root).unwrap().into_keys().collect()
}

/// Here and in the storage.
#[test]
fn a_run_that_began_at_an_older_checkpoint_counts_only_its_own() {
    let [here, copies, _] = folders();
    let storage = FolderStorage::new(copies.path());
    let of = |keep_last| saver(here.path(), keep_last, storage.clone());
    let saved = |saver: &Saver, step| {
        save(saver, step);
        saver.wait_for_copies().unwrap();
        let steps = there(here.path());
        assert_eq!(stored_steps(&storage).unwrap(), steps, "after step {step}");
        steps
    };
    let given_up = of(None);
    assert_eq!([4, 8, 12].map(|step| saved(&given_up, step))[2], [4, 8, 12]);
    drop(given_up);

    let run = of(Some(2));
    run.begin_from(4);
    run.retire(7).unwrap();
    assert_eq!(there(here.path()), [4, 8, 12], "nothing is passed before the first save");
    assert_eq!(run.of_run().unwrap().into_keys().collect::<Vec<_>>(), [4]);
    assert_eq!(saved(&run, 7), [4, 7, 8, 12], "those after it are left alone");
    assert_eq!(saved(&run, 10), [7, 10, 12]);
    assert_eq!(run.of_run().unwrap().into_keys().collect::<Vec<_>>(), [7, 10]);
    drop(run);

    let resumed = of(Some(2));
    resumed.begin_from(10);
    assert_eq!(saved(&resumed, 13), [10, 13]);
    assert_eq!(saved(&resumed, 16), [13, 16]);
}

#[test]
fn a_run_that_goes_back_leaves_the_later_checkpoints_of_another_alone() {
    let [here, ..] = folders();
    let options = || SaverOptions { keep_last: Some(3), ..SaverOptions::default() };
    let given_up = Saver::new(here.path(), 2, options()).unwrap();
    [4, 8, 12].iter().for_each(|step| save(&given_up, *step));
    drop(given_up);
    let run = Saver::new(here.path(), 2, options()).unwrap();
    run.begin_from(4);
    run.go_back_to(4).unwrap();
    assert_eq!(there(here.path()), [4, 8, 12]);
    [5, 6].iter().for_each(|step| save(&run, *step));
    run.go_back_to(5).unwrap();
    assert_eq!(there(here.path()), [4, 5, 8, 12]);
    assert_eq!(Checkpoint::open(here.path()).unwrap().state().step, 5);
}

/// A run of steps 4, 8 and 12, and one that began again from step 4 and has saved step 6.
fn two_runs(root: &Path) {
    for (step, begun_from) in [(4, None), (8, None), (12, None), (6, Some(4))] {
        let saver = Saver::new(root, 2, SaverOptions::default()).unwrap();
        let state = RunState { begun_from, ..state(step) };
        (0..2).for_each(|writer| saver.submit(writer, slices(writer, step as u32), &state).unwrap());
    }
}

#[test]
fn another_runs_checkpoint_is_not_taken_or_proposed_as_the_runs_own() {
    let [here, ..] = folders();
    two_runs(here.path());
    let folder = |step| Checkpoint::folder_of(here.path(), step);
    let fails = |step| {
        std::fs::remove_file(folder(step).join("rank_00000.safetensors")).unwrap();
        Checkpoint::open(folder(step)).err().unwrap().to_string()
    };
    std::fs::remove_file(here.path().join("latest")).unwrap();
    let warning = Checkpoint::open(here.path()).unwrap().warning().unwrap().to_string();
    let other = format!("{} is of a run that began again from step 4", folder(6).display());
    assert!(warning.contains("step_00000012 is taken") && warning.contains(&other), "{warning}");
    let error = fails(6);
    assert!(error.ends_with(&format!("or resume from {}, which is complete", folder(4).display())), "{error}");
    let error = fails(4);
    assert!(error.ends_with(&format!("or resume from {}, which is complete", folder(12).display())), "{error}");
    let error = fails(8);
    assert!(error.ends_with(&format!("or resume from {}, which is complete", folder(12).display())), "{error}");
    // Now the run that began again has none that is complete.
    let error = Checkpoint::open(folder(6)).err().unwrap().to_string();
    assert!(error.ends_with("step_00000012, which is complete, but may be of another run"), "{error}");
}
