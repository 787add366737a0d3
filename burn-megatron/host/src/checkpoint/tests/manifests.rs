//! Manifests that no run has written, their hash made right: refused with the file and what is wrong, never a panic.

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::super::Checkpoint;
use super::super::hashes::hex;

/// A folder with one checkpoint that has a tokenizer, and the checkpoint's own.
fn saved() -> (tempfile::TempDir, PathBuf) {
    let (folder, root) = super::damage::saved(&[7]);
    (folder, root.join("step_00000007"))
}

/// Writes another manifest, with its hash.
fn write(step: &Path, manifest: &[u8]) {
    fs::write(step.join("manifest.json"), manifest).unwrap();
    fs::write(step.join("SHA256SUMS"), format!("{}  manifest.json\n", hex(&Sha256::digest(manifest)))).unwrap();
}

fn manifest(step: &Path) -> Value {
    serde_json::from_slice(&fs::read(step.join("manifest.json")).unwrap()).unwrap()
}

/// The error of opening a checkpoint whose manifest has another value at `pointer`.
fn error_with(pointer: &str, value: Value) -> String {
    let (_folder, step) = saved();
    let mut manifest = manifest(&step);
    *manifest.pointer_mut(pointer).unwrap() = value;
    write(&step, manifest.to_string().as_bytes());
    Checkpoint::open(&step).err().unwrap_or_else(|| panic!("{pointer} is refused")).to_string()
}

#[test]
fn names_that_lead_out_of_the_checkpoint_are_refused() {
    for pointer in ["/tokenizer/name", "/files/0/name", "/tensors/0/slices/0/file"] {
        for name in ["../tokenizer.json", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\u{1b}[2Jb"] {
            let error = error_with(pointer, json!(name));
            assert!(error.contains("manifest.json: names the file"), "{pointer} = {name}: {error}");
            assert!(!error.contains('\u{1b}'), "no escapes for the terminal: {error:?}");
        }
    }
}

#[test]
fn counts_that_no_run_has_are_refused() {
    for (name, count) in [("step", u64::MAX), ("updates", u64::MAX), ("updates", 8), ("consumed_samples", u64::MAX)] {
        let error = error_with(&format!("/state/{name}"), json!(count));
        assert!(error.contains(&format!("manifest.json: `{name}` is {count}, it can be ")), "{error}");
    }
    assert!(error_with("/state/skipped_samples", json!(57)).contains("`skipped_samples` is 57, it can be 56 at most"));
    let twice = |step: &Path| {
        let mut manifest = manifest(step);
        let tensors = manifest["tensors"].as_array_mut().unwrap();
        tensors.push(tensors[0].clone());
        write(step, manifest.to_string().as_bytes());
    };
    let (_folder, step) = saved();
    twice(&step);
    let error = Checkpoint::open(&step).err().unwrap().to_string();
    assert!(error.contains("has the tensor `weight/layers.0.q_proj.weight` twice"), "{error}");
    let beyond = error_with("/tensors/0/global_shape", json!([u64::MAX, u64::MAX]));
    assert!(beyond.contains("beyond all memory"), "{beyond}");
}

#[test]
fn files_are_not_read_beyond_what_a_run_writes_and_pipes_not_at_all() {
    let (_folder, step) = saved();
    let file = fs::OpenOptions::new().write(true).open(step.join("manifest.json")).unwrap();
    // Takes no space.
    file.set_len(1 << 33).unwrap();
    let error = Checkpoint::open(&step).err().unwrap().to_string();
    assert!(error.contains("manifest.json: has 8589934592 bytes, it can have 1073741824 at most"), "{error}");

    for name in ["SHA256SUMS", "rank_00000.safetensors", "tokenizer.json"] {
        let (_folder, step) = saved();
        fs::remove_file(step.join(name)).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(step.join(name)).status().unwrap().success());
        let error = Checkpoint::open(&step).err().unwrap().to_string();
        assert!(error.contains(&format!("{name}: is not a file")), "{error}");
    }
}

/// Cases of the fuzzing: `BURN_MEGATRON_FUZZ_CASES`, or few.
fn cases() -> ProptestConfig {
    let cases = std::env::var("BURN_MEGATRON_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok());
    ProptestConfig::with_cases(cases.unwrap_or(200))
}

/// Values at the edges of all types.
fn value() -> impl Strategy<Value = Value> {
    let numbers = [0, 1, 7, 1 << 31, 1 << 32, 1 << 53, 1 << 62, u64::MAX / 4 + 1, u64::MAX - 1, u64::MAX];
    prop_oneof![
        prop::sample::select(numbers.to_vec()).prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        prop::sample::select(vec![
            "../x",
            "weight",
            "exp_avg",
            "F32",
            "F64",
            "F4",
            "TP2 DP2",
            "rank_00000.safetensors"
        ])
        .prop_map(Value::from),
        prop::collection::vec(any::<u64>(), 0..4).prop_map(Value::from),
        Just(Value::Null),
        Just(json!([[0, 0]])),
        Just(json!([[5, 3]])),
        Just(json!({})),
    ]
}

/// Pointers to everything in a value.
fn pointers(value: &Value, path: String, found: &mut Vec<String>) {
    found.push(path.clone());
    match value {
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| pointers(item, format!("{path}/{index}"), found))
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(name, field)| pointers(field, format!("{path}/{name}"), found));
        }
        _ => {}
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn no_manifest_makes_the_reader_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), value(), 0..3u8), 1..5),
        bytes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
    ) {
        let (_folder, step) = saved();
        let mut manifest = manifest(&step);
        for (index, value, kind) in changes {
            let mut all = Vec::new();
            pointers(&manifest, String::new(), &mut all);
            let target = manifest.pointer_mut(&all[index.index(all.len())]).unwrap();
            match (kind, target) {
                // An element of a list once more, or gone.
                (1, Value::Array(items)) if !items.is_empty() => items.push(items[index.index(items.len())].clone()),
                (2, Value::Array(items)) => drop(items.pop()),
                (_, target) => *target = value,
            }
        }
        let mut json = manifest.to_string().into_bytes();
        for (index, byte) in bytes {
            let at = index.index(json.len());
            json[at] = byte;
        }
        write(&step, &json);
        // Whatever opens can be read, described and verified.
        if let Ok(checkpoint) = Checkpoint::open(&step) {
            for tensor in checkpoint.tensors() {
                let whole: Vec<_> = tensor.global_shape.iter().map(|&size| 0..size).collect();
                checkpoint.read(tensor.kind, &tensor.name, &tensor.global_shape, &whole).unwrap();
                tensor.bytes();
            }
            let _ = checkpoint.verify(0, 1);
        }
    }
}
