//! The folder of a run: whose it is, and what a new run finds in it.

use tempfile::TempDir;

use super::*;
use crate::checkpoint::Saver;

#[test]
fn damaged_checkpoints_are_neither_ignored_nor_touched() {
    let folder = book();
    run(&config(folder.path(), &[("checkpoint.every", "3"), ("checkpoint.keep-last", "none")])).unwrap();
    let root = folder.path().join("run/checkpoints");
    std::fs::remove_file(root.join("latest")).unwrap();
    says!(Plan::new(&config(folder.path(), &[]), &[]).unwrap(), "warning      there is no ", "step_00000006 is taken");

    // As a copy that is not done yet: every checkpoint lacks something.
    for step in [3, 6] {
        std::fs::remove_file(root.join(format!("step_{step:08}/rank_00000.safetensors"))).unwrap();
    }
    let files = || walk(&folder.path().join("run"));
    let before = files();
    for (resume, words) in [
        ("if-present", "step_00000003/rank_00000.safetensors: is missing"),
        ("never", "holds step_00000003, step_00000006, checkpoints that are not complete"),
    ] {
        let said = run(&config(folder.path(), &[("checkpoint.resume", resume)])).unwrap_err().to_string();
        assert!(said.starts_with(&format!("checkpoint.resume = {resume}")) && said.contains(words), "{said}");
        says!(said, "another checkpoint.directory");
    }
    assert_eq!(files(), before);
}

/// Paths and contents of all files below a folder.
fn walk(folder: &Path) -> std::collections::BTreeMap<PathBuf, Vec<u8>> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = entries.map(|path| match path.is_dir() {
        true => walk(&path),
        false => [(path.clone(), std::fs::read(path).unwrap())].into(),
    });
    files.flatten().collect()
}

#[test]
fn a_second_run_in_a_folder_is_refused_before_it_writes() {
    let folder = book();
    let output = folder.path().join("run");
    let lock = lock_output(&output).unwrap();
    for directory in ["none", "elsewhere"] {
        let config = config(folder.path(), &[("checkpoint.directory", directory)]);
        let said = run(&config).unwrap_err().to_string();
        let holder = format!("is in use by another run (process {} on ", std::process::id());
        assert!(said.starts_with("output.directory = ") && said.contains(&holder), "{said}");
    }
    assert_eq!(walk(&output).into_keys().collect::<Vec<_>>(), [output.join(".run.lock")], "no text is tokenized");
    drop(lock);
    run(&config(folder.path(), &[("checkpoint.directory", "none")])).unwrap();
}

#[test]
fn a_run_does_not_begin_among_the_copies_of_another() {
    let (first, second, copies) = (book(), book(), tempfile::tempdir().unwrap());
    let storage = ("checkpoint.storage", copies.path().to_str().unwrap());
    run(&config(first.path(), &[storage])).unwrap();
    let before = walk(copies.path());
    for resume in ["if-present", "never"] {
        let said = run(&config(second.path(), &[storage, ("checkpoint.resume", resume)])).unwrap_err().to_string();
        assert!(said.starts_with(&format!("checkpoint.resume = {resume}")), "{said}");
        says!(said, "has step 6: choose another storage, or bring it with `burn-megatron fetch");
    }
    assert_eq!(walk(copies.path()), before);
}

/// The first one has not saved yet.
#[test]
fn a_run_does_not_begin_where_another_has_begun_to_copy_to() {
    let (first, second, copies) = (book(), book(), tempfile::tempdir().unwrap());
    let of = |folder: &TempDir| config(folder.path(), &[("checkpoint.storage", copies.path().to_str().unwrap())]);
    let options = resume::options(&of(&first), None).unwrap().unwrap();
    let begun = Saver::new(&options.root, 1, options.saver).unwrap();
    let before = walk(copies.path());
    assert_eq!(before.keys().collect::<Vec<_>>(), [&copies.path().join("owner")]);
    run(&of(&second)).unwrap_err();
    assert_eq!(walk(copies.path()), before);
    assert_eq!(Checkpoint::traces(&second.path().join("run/checkpoints")).unwrap(), [""; 0]);
    drop(begun);
    run(&of(&first)).unwrap();
    run(&of(&first)).unwrap();
}

#[test]
fn the_command_that_began_a_run_from_a_checkpoint_continues_it() {
    let folder = book();
    run(&config(folder.path(), &[("checkpoint.every", "3"), ("checkpoint.keep-last", "none")])).unwrap();
    let named = folder.path().join("run/checkpoints/step_00000003").display().to_string();
    let output = folder.path().join("again").display().to_string();
    let of = |resume: &str| config(folder.path(), &[("checkpoint.resume", resume), ("output.directory", &output)]);
    let start = |resume: &str| Plan::new(&of(resume), &[]).unwrap().start.unwrap();
    assert_eq!((start(&named).step, start(&named).warning), (3, None));
    run(&of(&named)).unwrap();
    let own = start(&named);
    assert!(own.step == 6 && own.path.starts_with(&output), "{own:?}");
    says!(own.warning.unwrap(), "step_00000006 is later than checkpoint.resume = ");
    // One of its own is meant.
    let last = Path::new(&output).join("checkpoints/step_00000006");
    assert_eq!(start(last.to_str().unwrap()).warning, None);
}

/// The run goes back within its own folder, where later checkpoints are.
#[test]
fn the_command_that_went_back_to_a_checkpoint_continues_from_the_ones_it_has_saved_since() {
    let folder = book();
    let keys = |every, kept| [("checkpoint.every", every), ("checkpoint.keep-last", kept)];
    run(&config(folder.path(), &keys("2", "none"))).unwrap();
    let root = folder.path().join("run/checkpoints");
    let named = root.join("step_00000002").display().to_string();
    // It ends after so many steps, and would save none before.
    let of = |resume: &str, steps, kept| {
        let keys = [&keys("9", kept)[..], &[("checkpoint.resume", resume), ("training.exit-interval", steps)]].concat();
        config(folder.path(), &keys)
    };
    let start = |resume: &str| Plan::new(&of(resume, "9", "none"), &[]).unwrap().start.unwrap();
    let began = |resume: &str| (start(resume).step, start(resume).begun_from);
    assert_eq!(began(&named), (2, Some(2)), "steps 4 and 6 are of the run that is given up");
    assert_eq!(began("if-present"), (6, None));
    run(&of(&named, "3", "none")).unwrap();
    assert_eq!(began(&named), (3, Some(2)));
    says!(start(&named).warning.unwrap(), "step_00000003 is later than checkpoint.resume = ");
    assert_eq!(began("if-present"), (3, Some(2)));
    // And once more, when the one that it began with is no longer there.
    run(&of(&named, "5", "1")).unwrap();
    assert_eq!(Checkpoint::list(&root).unwrap().into_keys().collect::<Vec<_>>(), [5, 6]);
    assert_eq!(began(&named), (5, Some(2)));
    let other = root.join("step_00000006").display().to_string();
    assert_eq!(began(&other), (6, Some(6)));
}

#[test]
fn a_mistyped_word_for_where_to_resume_is_no_path() {
    let folder = book();
    let refused = |resume: &str| {
        Plan::new(&config(folder.path(), &[("checkpoint.resume", resume)]), &[]).unwrap_err().to_string()
    };
    let legal = "; legal: if-present, never, or the path of a checkpoint";
    let said = refused("if_present");
    assert!(said.starts_with("checkpoint.resume = if_present: ") && said.ends_with(legal), "{said}");
    assert!(!refused("runs/other").contains("legal"));
}

#[test]
fn checkpoints_are_not_copied_onto_themselves() {
    let folder = book();
    let root = folder.path().canonicalize().unwrap().join("run/checkpoints");
    std::fs::create_dir_all(&root).unwrap();
    std::os::unix::fs::symlink(&root, folder.path().join("link")).unwrap();
    for storage in [root.clone(), folder.path().join("link")] {
        let config = config(folder.path(), &[("checkpoint.storage", storage.to_str().unwrap())]);
        says!(run(&config).unwrap_err().to_string(), "is checkpoint.directory itself");
    }
}

/// transformers writes no modules of multi-token prediction, but their number.
#[test]
fn modules_that_a_folder_lacks_are_named() {
    let folder = book();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf/glm4_moe").display().to_string();
    let said = Plan::new(&config(folder.path(), &[("model.hf", &golden)]), &[]).unwrap_err();
    says!(said, "model.num-nextn-predict-layers = 1: ", "has weights of 0; nearest legal: 0");
}
