//! What a saver refuses, waits for, reports and keeps.

use std::path::Path;

use serde_json::json;

use super::super::disk::{Fault, Files, Loss, SimDisk};
use super::super::{Checkpoint, RunState, Saver, SaverOptions, Slice};
use super::round_trip::{contents, expected, slices, state};

pub(super) const ROOT: &str = "/root";

pub(super) fn saver(disk: &SimDisk, options: SaverOptions) -> Saver {
    Saver::on(Files::new(disk.clone()), Path::new(ROOT), 2, options).unwrap()
}

pub(super) fn submit(saver: &Saver, step: u64) {
    (0..2).for_each(|writer| saver.submit(writer, slices(writer, step as u32), &state(step)).unwrap());
}

pub(super) fn background() -> SaverOptions {
    SaverOptions { background: true, ..Default::default() }
}

/// The steps on the disk, and the contents of the latest.
pub(super) fn steps(disk: &SimDisk) -> Vec<u64> {
    let folder = tempfile::tempdir().unwrap();
    disk.export(folder.path());
    let root = folder.path().join(&ROOT[1..]);
    let latest = Checkpoint::open(&root).unwrap();
    let step = latest.state().step;
    assert_eq!(contents(&latest), expected(step, step as u32));
    Checkpoint::list(&root).unwrap().into_keys().collect()
}

pub(super) fn says(error: &(impl ToString + ?Sized), words: &[&str]) {
    let error = error.to_string();
    for word in words {
        assert!(error.contains(word), "`{word}` is missing in: {error}");
    }
}

#[test]
fn saves_in_the_background_follow_each_other_and_are_all_reported() {
    let disk = SimDisk::new();
    let saver = saver(&disk, background());
    (1..=5).for_each(|step| submit(&saver, step));
    let reports = saver.wait().unwrap();
    assert_eq!(reports.iter().map(|report| report.step).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert!(reports.iter().all(|report| report.bytes > 0 && report.seconds > 0.0));
    assert!(saver.finished().is_empty(), "each is reported once");
    assert_eq!(steps(&disk), [1, 2, 3, 4, 5]);
}

#[test]
fn writers_may_come_in_any_order_from_threads_of_their_own() {
    let disk = SimDisk::new();
    let saver = saver(&disk, background());
    std::thread::scope(|scope| {
        for writer in [1, 0] {
            let saver = &saver;
            scope.spawn(move || saver.submit(writer, slices(writer, 3), &state(3)).unwrap());
        }
    });
    assert_eq!(saver.wait().unwrap().len(), 1);
    assert_eq!(steps(&disk), [3]);
}

#[test]
fn dropping_the_saver_waits_for_the_save() {
    let disk = SimDisk::new();
    submit(&saver(&disk, background()), 1);
    assert_eq!(steps(&disk), [1]);
}

#[test]
fn a_failed_save_is_reported_and_the_next_one_succeeds() {
    for background in [false, true] {
        let disk = SimDisk::new();
        let saver = saver(&disk, SaverOptions { background, ..Default::default() });
        submit(&saver, 1);
        saver.wait().unwrap();
        // Some operations later: in the middle of the files.
        disk.set_fault(Some(Fault::Fail(8, std::io::ErrorKind::StorageFull)));
        disk.set_free_space(1234);
        for writer in 0..2 {
            let result = saver.submit(writer, slices(writer, 2), &state(2));
            assert!(!background || result.is_ok(), "in the background the failure comes later");
        }
        let error = saver.wait().unwrap_err();
        // In the background two writers take turns, and one may not even have made its file.
        match error.to_string().contains("cannot create") && background {
            true => says(&error, &["rank_0000", "no storage space", "free some space"]),
            false => says(&error, &["rank_0000", "disk is full", "the file needs", "1.21 KiB are free", "keep-last"]),
        }
        assert_eq!(steps(&disk), [1]);
        submit(&saver, 2);
        assert_eq!(saver.wait().unwrap().len(), 1);
        assert_eq!(steps(&disk), [1, 2]);
    }
}

#[test]
fn a_writer_that_never_comes_fails_the_save_and_nothing_waits_for_it() {
    let disk = SimDisk::new();
    for background in [false, true] {
        let saver = saver(&disk, SaverOptions { background, ..Default::default() });
        saver.submit(0, slices(0, 1), &state(1)).unwrap();
        submit(&saver, 2);
        says(&saver.wait().unwrap_err(), &["step 1", "nothing came from writer 1 of 2"]);
        assert_eq!(saver.wait().unwrap()[0].step, 2);
        saver.submit(1, slices(1, 3), &state(3)).unwrap();
        says(&saver.wait().unwrap_err(), &["step 3", "writer 0"]);
        assert_eq!(steps(&disk), [2]);
        assert!(disk.tree().keys().all(|path| !path.contains("tmp")), "nothing is left of what failed");
    }
}

#[test]
fn old_checkpoints_go_after_the_new_one_is_there() {
    let disk = SimDisk::new();
    let options = SaverOptions { keep_last: Some(2), keep_every: Some(300), ..Default::default() };
    let saver = saver(&disk, options);
    (1..=8).for_each(|save| submit(&saver, 100 * save));
    let deleted: Vec<u64> = saver.wait().unwrap().into_iter().flat_map(|report| report.deleted).collect();
    assert_eq!(deleted, [100, 200, 400, 500]);
    assert_eq!(steps(&disk), [300, 600, 700, 800]);
}

#[test]
fn a_retired_checkpoint_goes_as_soon_as_another_is_the_latest() {
    let disk = SimDisk::new();
    let saver = saver(&disk, SaverOptions::default());
    saver.retire(1).unwrap();
    (1..=3).for_each(|step| submit(&saver, step));
    assert_eq!(steps(&disk), [1, 2, 3], "what is not there cannot be retired");
    saver.retire(1).unwrap();
    assert_eq!(steps(&disk), [2, 3]);
    saver.retire(3).unwrap();
    assert_eq!(steps(&disk), [2, 3], "it is the latest");
    submit(&saver, 4);
    assert_eq!(steps(&disk), [2, 4]);
    saver.submit(0, slices(0, 5), &state(5)).unwrap();
    saver.retire(2).unwrap();
    assert_eq!(steps(&disk), [2, 4], "a save is in progress");
    saver.submit(1, slices(1, 5), &state(5)).unwrap();
    assert_eq!(steps(&disk), [4, 5]);
}

#[test]
fn a_run_that_goes_back_saves_over_later_steps() {
    let disk = SimDisk::new();
    let options = || SaverOptions { keep_last: Some(2), ..Default::default() };
    let first = saver(&disk, options());
    (1..=4).for_each(|step| submit(&first, step));
    drop(first);
    assert_eq!(steps(&disk), [3, 4]);
    let second = saver(&disk, options());
    submit(&second, 3);
    assert_eq!(steps(&disk), [3, 4], "the latest is 3; 4 waits to be saved again");
    submit(&second, 4);
    submit(&second, 5);
    assert_eq!(steps(&disk), [4, 5]);
}

/// Whatever is done by then, a run that is killed resumes from the checkpoint that it went back to.
#[test]
fn a_run_that_goes_on_from_an_older_checkpoint_removes_the_later_ones() {
    let disk = SimDisk::new();
    let saver = saver(&disk, SaverOptions::default());
    (1..=4).for_each(|step| submit(&saver, step));
    saver.go_back_to(4).unwrap();
    assert_eq!(steps(&disk), [1, 2, 3, 4]);
    saver.go_back_to(2).unwrap();
    assert_eq!(steps(&disk), [1, 2]);
    assert_eq!(disk.tree()[&format!("{ROOT}/latest")].as_deref(), Some(&b"step_00000002\n"[..]));
    submit(&saver, 3);
    assert_eq!(steps(&disk), [1, 2, 3]);
}

#[test]
fn slices_that_cannot_be_saved_are_named_before_anything_is_written() {
    let disk = SimDisk::new();
    let saver = saver(&disk, SaverOptions::default());
    let before = disk.tree();
    let refused = |edit: fn(&mut Vec<Slice>), words: &[&str]| {
        let mut slices = slices(1, 0);
        edit(&mut slices);
        says(&saver.submit(1, slices, &state(9)).unwrap_err(), words);
    };
    let key = "weight/layers.0.q_proj.weight[0:3,2:4]";
    refused(
        |slices| slices[0].data = slices[0].data[..23].to_vec().into(),
        &["writer 1", "step 9", key, "23 bytes", "24"],
    );
    refused(|slices| slices[0].ranges[1] = 3..5, &["[0:3,3:5]", "not inside the global shape [3, 4]"]);
    refused(|slices| slices[1].ranges = Vec::new(), &["exp_avg/norm.weight", "not inside"]);
    refused(|slices| slices.push(slices[0].clone()), &[key, "given twice"]);
    refused(|slices| slices[0].name = "a\nb".into(), &["a\\nb", "not a name"]);
    refused(|slices| slices[0].dtype = safetensors::Dtype::F4, &["F4", "whole bytes"]);
    says(&saver.submit(2, slices(1, 0), &state(9)).unwrap_err(), &["no writer 2"]);
    assert_eq!(disk.tree(), before);
}

#[test]
fn slices_that_do_not_make_up_a_tensor_are_not_committed() {
    let disk = SimDisk::new();
    let saver = saver(&disk, SaverOptions::default());
    submit(&saver, 1);
    saver.wait().unwrap();
    let refused = |edit: fn(&mut Vec<Slice>), words: &[&str]| {
        let mut slices1 = slices(1, 2);
        edit(&mut slices1);
        saver.submit(0, slices(0, 2), &state(2)).unwrap();
        saver.submit(1, slices1, &state(2)).unwrap_err();
        says(&saver.wait().unwrap_err(), words);
        assert_eq!(steps(&disk), [1]);
    };
    let key = "weight/layers.0.q_proj.weight";
    refused(
        |slices| slices[0].ranges[1] = 1..3,
        &[key, "[0:3,0:2] in rank_00000", "[0:3,1:3] in rank_00001", "overlap"],
    );
    refused(|slices| drop(slices.remove(0)), &[key, "6 of 12 elements", "missing"]);
    refused(|slices| slices[0].global_shape = vec![3, 5], &[key, "disagree", "[3, 4]", "[3, 5]"]);
    refused(|slices| slices[0].dtype = safetensors::Dtype::I32, &[key, "F32", "I32"]);
}

#[test]
fn writers_that_disagree_about_the_run_are_stopped() {
    let disk = SimDisk::new();
    let saver = saver(&disk, SaverOptions::default());
    saver.submit(0, slices(0, 1), &state(1)).unwrap();
    let other = RunState { rng: json!("other"), ..state(1) };
    says(&saver.submit(1, slices(1, 1), &other).unwrap_err(), &["step 1", "writer 1", "`rng`"]);
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let new =
        |writers, options| Saver::on(Files::new(SimDisk::new()), Path::new(ROOT), writers, options).err().unwrap();
    says(&new(0, SaverOptions::default()), &["writers 0"]);
    says(&new(1, SaverOptions { keep_last: Some(0), ..Default::default() }), &["keep-last 0", "nearest legal: 1"]);
    says(&new(1, SaverOptions { keep_every: Some(0), ..Default::default() }), &["keep-every 0"]);
    let tokenizer = Some("/no/tokenizer.json".into());
    says(&new(1, SaverOptions { tokenizer, ..Default::default() }), &["/no/tokenizer.json"]);
}

#[test]
fn a_rehearsal_finds_what_the_first_save_would_fail_with() {
    let disk = SimDisk::new();
    let saver = saver(&disk, SaverOptions { keep_last: Some(2), ..Default::default() });
    let before = disk.tree();
    saver.rehearse(1 << 20, None).unwrap();
    assert_eq!(disk.tree(), before, "nothing is left of it");
    disk.set_free_space((3 << 20) - 1);
    let error = saver.rehearse(1 << 20, None).unwrap_err();
    says(&error, &[ROOT, "3 checkpoints of 1.00 MiB", "need 3.00 MiB", "keep-last", "another folder"]);
    // A run that saves once does not need the room of all that would be kept.
    saver.rehearse(1 << 20, Some(1)).unwrap();
    disk.set_free_space((1 << 20) - 1);
    says(&saver.rehearse(1 << 20, Some(1)).unwrap_err(), &["1 checkpoint of 1.00 MiB needs 1.00 MiB"]);
    disk.set_free_space(3 << 20);
    saver.rehearse(1 << 20, None).unwrap();
    // What is there already and will be replaced need not be free.
    submit(&saver, 1);
    disk.set_free_space((3 << 20) - 1000);
    saver.rehearse(1 << 20, None).unwrap();
}

#[test]
fn a_folder_belongs_to_one_run_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let new = || Saver::new(folder.path(), 1, SaverOptions::default());
    let first = new().unwrap();
    says(&new().err().unwrap(), &["in use by another run", &format!("process {}", std::process::id())]);
    drop(first);
    new().unwrap();
}

#[test]
fn a_power_cut_right_after_a_save_loses_nothing() {
    let disk = SimDisk::new();
    submit(&saver(&disk, SaverOptions::default()), 1);
    assert_eq!(steps(&disk.restart(Loss::Everything)), [1]);
}
