//! Checkpoints that are damaged, of another model, or not there: refused with the file, the tensor and what to do.

use std::fs;
use std::path::{Path, PathBuf};

use super::super::{Checkpoint, CheckpointError, Kind, Saver, SaverOptions};
use super::round_trip::{contents, expected};
use super::saving::{says, submit};

/// A folder of checkpoints of these steps, with a tokenizer.
pub(super) fn saved(steps: &[u64]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let tokenizer = folder.path().join("a tokenizer");
    fs::write(&tokenizer, "{}").unwrap();
    let root = folder.path().join("root");
    let saver = Saver::new(&root, 2, SaverOptions { tokenizer: Some(tokenizer), ..Default::default() }).unwrap();
    steps.iter().for_each(|step| submit(&saver, *step));
    (folder, root)
}

/// The error of opening a folder of checkpoints after `damage` to the latest one.
fn error_after(damage: impl FnOnce(&Path)) -> String {
    let (_folder, root) = saved(&[100, 200]);
    damage(&root.join("step_00000200"));
    Checkpoint::open(&root).and_then(|checkpoint| checkpoint.verify(0, 1)).expect_err("damage is found").to_string()
}

fn edit(file: PathBuf, edit: impl FnOnce(Vec<u8>) -> Vec<u8>) {
    fs::write(&file, edit(fs::read(&file).unwrap())).unwrap();
}

fn replace(file: PathBuf, from: &str, to: &str) {
    edit(file, |bytes| {
        let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat()
    });
}

const SHARD: &str = "rank_00001.safetensors";

#[test]
fn a_file_that_is_missing_or_short_is_named() {
    for file in [SHARD, "manifest.json", "SHA256SUMS", "tokenizer.json"] {
        // Without its manifest a folder is no checkpoint; that its name is still there is another error.
        let error = error_after(|step| fs::remove_file(step.join(file)).unwrap());
        says(&error, &[&format!("step_00000200/{file}"), "is missing", "step_00000100, which is complete"]);
    }
    let error = error_after(|step| edit(step.join(SHARD), |bytes| bytes[..bytes.len() - 4].to_vec()));
    says(&error, &[SHARD, "were written", "step_00000100, which is complete"]);
}

#[test]
fn any_flipped_bit_is_found() {
    let (_folder, root) = saved(&[100, 200]);
    let step = root.join("step_00000200");
    for entry in fs::read_dir(&step).unwrap() {
        let file = entry.unwrap().path();
        let whole = fs::read(&file).unwrap();
        let name = file.file_name().unwrap().to_str().unwrap();
        for at in (0..whole.len()).step_by(whole.len() / 40 + 1) {
            let mut flipped = whole.clone();
            flipped[at] ^= 1;
            fs::write(&file, flipped).unwrap();
            let found = Checkpoint::open(&root).and_then(|checkpoint| checkpoint.verify(0, 1));
            // The other lines of the list of hashes are for `sha256sum` only; the manifest has them too.
            if name != "SHA256SUMS" || at < 64 {
                says(&found.expect_err("a flipped bit").to_string(), &["step_00000200/"]);
            }
        }
        fs::write(&file, whole).unwrap();
    }
    assert!(Checkpoint::open(&root).unwrap().verify(0, 1).is_ok());
}

#[test]
fn a_manifest_that_is_not_understood_is_refused() {
    let manifest = |step: &Path| step.join("manifest.json");
    says(&error_after(|step| fs::write(manifest(step), "not JSON").unwrap()), &["manifest.json", "not the manifest"]);
    let newer = error_after(|step| replace(manifest(step), "\"version\": 1", "\"version\": 2"));
    says(&newer, &["manifest.json", "version 2", "newer program", "up to 1"]);
    let other = error_after(|step| replace(manifest(step), "burn-megatron checkpoint", "something else"));
    says(&other, &["format `something else`"]);
}

#[test]
fn a_file_of_another_checkpoint_does_not_pass_for_its_own() {
    let key = "exp_avg/norm.weight";
    says(&error_after(|step| replace(step.join(SHARD), key, "exp_avg/mrom.weight")), &[SHARD, "no tensor", key]);
    let error = error_after(|step| replace(step.join(SHARD), "\"shape\":[5]", "\"shape\":[6]"));
    says(&error, &[SHARD, "not a safetensors file"]);
    let error = error_after(|step| replace(step.join(SHARD), "\"dtype\":\"F32\"", "\"dtype\":\"I32\""));
    says(&error, &[SHARD, "I32", "by the manifest it is F32"]);
}

#[test]
fn another_model_is_recognised() {
    let (_folder, root) = saved(&[100, 200]);
    let checkpoint = Checkpoint::open(&root).unwrap();
    let read = |kind, name: &str, shape: &[usize]| {
        let whole: Vec<_> = shape.iter().map(|&size| 0..size).collect();
        checkpoint.read(kind, name, shape, &whole).unwrap_err().to_string()
    };
    let error = read(Kind::Weight, "layers.0.q_proj.weight", &[4, 4]);
    says(&error, &["weight/layers.0.q_proj.weight", "[3, 4]", "[4, 4]", "another model"]);
    let error = read(Kind::Weight, "layers.7.q_proj.weight", &[4, 4]);
    says(&error, &["weight/layers.7.q_proj.weight", "1 `weight` tensors", "another model"]);
    let error = read(Kind::SecondMoment, "norm.weight", &[5]);
    says(&error, &["exp_avg_sq/norm.weight", "of this name it holds exp_avg"]);
}

#[test]
fn where_there_is_no_checkpoint_the_error_says_what_there_is() {
    let folder = tempfile::tempdir().unwrap();
    let error = |path: &Path| {
        let error = Checkpoint::open(path).err().unwrap();
        assert!(matches!(error, CheckpointError::NotFound { .. }), "{error}");
        error.to_string()
    };
    says(&error(&folder.path().join("nowhere")), &["nowhere", "no such folder"]);
    says(&error(folder.path()), &["it has no manifest.json", "there is no", "latest"]);
    // The output folder of a run instead of the one in it.
    fs::create_dir_all(folder.path().join("checkpoints")).unwrap();
    assert!(!error(folder.path()).contains("did you mean"), "that one is empty");
    let (run, root) = saved(&[100, 200]);
    fs::rename(root, run.path().join("checkpoints")).unwrap();
    let asked = format!("did you mean {}?", run.path().join("checkpoints").display());
    says(&error(run.path()), &[&asked]);
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    says(&error(&file), &["it is a file", "give the folder"]);
}

/// Nobody may take such a folder for an empty one and save over what is left.
#[test]
fn a_folder_whose_checkpoints_are_all_damaged_is_not_an_empty_one() {
    let error = |damage: &dyn Fn(&Path), words: &[&str]| {
        let (_folder, root) = saved(&[100, 200]);
        damage(&root);
        let error = Checkpoint::open(&root).err().unwrap();
        assert!(matches!(error, CheckpointError::Unusable { .. }), "{error}");
        says(&error, words);
        says(&error, &["none can be used", "restore what is missing", "another checkpoint.directory"]);
    };
    let steps = ["step_00000100", "step_00000200"];
    let remove = |root: &Path, name: &str| match root.join(name) {
        path if path.is_dir() => fs::remove_dir_all(path).unwrap(),
        path => fs::remove_file(path).unwrap(),
    };
    let no_steps = |root: &Path| steps.iter().for_each(|step| remove(root, step));
    error(&no_steps, &["latest names step_00000200, which is not there"]);
    let a_copy_under_way = |root: &Path| {
        remove(root, "latest");
        remove(root, &format!("step_00000100/{SHARD}"));
        remove(root, "step_00000200/manifest.json");
    };
    let missing = format!("step_00000100/{SHARD}: is missing");
    error(&a_copy_under_way, &["there is no", &missing, "step_00000200/manifest.json: is missing"]);
    let short = |root: &Path| {
        remove(root, "latest");
        remove(root, steps[0]);
        edit(root.join("step_00000200").join(SHARD), |bytes| bytes[..9].to_vec());
        remove(root, "step_00000200/tokenizer.json");
    };
    error(&short, &["has 9 bytes", "(and 1 more)"]);
    // What a killed first save leaves is none.
    let (_folder, root) = saved(&[100, 200]);
    no_steps(&root);
    remove(&root, "latest");
    fs::create_dir(root.join(".step_00000300.tmp")).unwrap();
    assert!(matches!(Checkpoint::open(&root), Err(CheckpointError::NotFound { .. })));
}

#[test]
fn without_a_latest_that_leads_somewhere_the_newest_complete_one_is_taken() {
    let (_folder, root) = saved(&[100, 200]);
    let open = || {
        let checkpoint = Checkpoint::open(&root).unwrap();
        (contents(&checkpoint), checkpoint.warning().unwrap_or_default().to_string())
    };
    assert_eq!(open(), (expected(200, 200), String::new()));
    for (latest, words) in [
        (Some(&b"step_00000300\n"[..]), "names step_00000300, which is not there"),
        (Some(b"200"), "does not name a checkpoint: write the name of one there, such as step_00000200, or remove it"),
        (Some(b"step_\xff"), "is not text and does not name a checkpoint: write the name of one there"),
        (None, "there is no"),
    ] {
        match latest {
            Some(text) => fs::write(root.join("latest"), text).unwrap(),
            None => fs::remove_file(root.join("latest")).unwrap(),
        }
        let (found, warning) = open();
        assert_eq!(found, expected(200, 200));
        says(&warning, &[words, "latest", "step_00000200 is taken"]);
    }
    fs::remove_file(root.join("step_00000200").join(SHARD)).unwrap();
    assert_eq!(open().0, expected(100, 100), "an incomplete one is passed over");
    assert_eq!(Checkpoint::list(&root).unwrap().into_keys().collect::<Vec<_>>(), [100]);
}
