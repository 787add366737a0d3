//! Folders and checkpoints of others: nothing of theirs is written elsewhere, and nothing is taken for what it is not.

use std::fs;
use std::path::{Path, PathBuf};

use burn_megatron::checkpoint::Checkpoint;
use burn_megatron::hf::{HfFolder, TensorReader, companions_of};
use models::ModelConfig;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::files::changed;
use crate::round_trip::{command, text};

/// A checkpoint whose manifest says that these files came with the model; its hashes are right.
fn checkpoint_with(root: &Path, files: Value) -> PathBuf {
    let folder = changed("llama3", |_| {});
    let imported = command(&["import", "--hf", text(folder.path()), "--output", text(root)]);
    assert!(imported.status.success(), "{}", String::from_utf8_lossy(&imported.stderr));
    let step = root.join("step_00000000");
    let mut manifest: Value = serde_json::from_slice(&fs::read(step.join("manifest.json")).unwrap()).unwrap();
    manifest["state"]["config"]["hugging_face"] = files;
    let manifest = manifest.to_string();
    fs::write(step.join("manifest.json"), &manifest).unwrap();
    let sums = fs::read_to_string(step.join("SHA256SUMS")).unwrap();
    let hash: String = Sha256::digest(&manifest).iter().map(|byte| format!("{byte:02x}")).collect();
    let sums = sums.lines().map(|line| match line.ends_with("  manifest.json") {
        true => format!("{hash}  manifest.json\n"),
        false => format!("{line}\n"),
    });
    fs::write(step.join("SHA256SUMS"), sums.collect::<String>()).unwrap();
    step
}

#[test]
fn an_export_writes_no_file_that_does_not_come_with_a_model() {
    let folder = tempfile::tempdir().unwrap();
    for (number, name) in ["../outside.txt", "model.safetensors", "a/b.json", ".", ""].into_iter().enumerate() {
        let root = folder.path().join(number.to_string());
        let step = checkpoint_with(&root, json!({name: "x\n", "chat_template.jinja": "fine"}));
        let out = folder.path().join(format!("{number}_out"));
        let refused = command(&["export", "--checkpoint", text(&root), "--hf", text(&out)]);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(1), "{name}: {said}");
        assert!(said.contains(text(&step.join("manifest.json"))) && said.contains(&format!("{name:?}")), "{said}");
        says!(said, "legal: added_tokens.json, chat_template.jinja");
        assert!(!out.exists() && !folder.path().join("outside.txt").exists());
        // A run that resumes takes them from here too.
        assert!(companions_of(&Checkpoint::open(&root).unwrap()).is_err());
    }
    let absolute = folder.path().join("absolute.txt");
    let root = folder.path().join("absolute");
    checkpoint_with(&root, json!({text(&absolute): "x\n"}));
    let refused = command(&["export", "--checkpoint", text(&root), "--hf", text(&folder.path().join("out"))]);
    assert!(!refused.status.success() && !absolute.exists());

    let root = folder.path().join("known");
    checkpoint_with(&root, json!({"chat_template.jinja": "fine"}));
    let out = folder.path().join("known_out");
    let written = command(&["export", "--checkpoint", text(&root), "--hf", text(&out)]);
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));
    assert_eq!(fs::read_to_string(out.join("chat_template.jinja")).unwrap(), "fine");
}

#[test]
fn an_import_opens_the_tokenizer_as_one() {
    let folder = changed("llama3", |_| {});
    let output = tempfile::tempdir().unwrap();
    let root = output.path().join("checkpoint");
    std::os::unix::fs::symlink("/etc/passwd", folder.path().join("tokenizer.json")).unwrap();
    let refused = command(&["import", "--hf", text(folder.path()), "--output", text(&root)]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    says!(said, "tokenizer.json: is no tokenizer: ");
    assert!(!root.join("step_00000000").exists());
}

#[test]
fn weights_that_shrink_while_they_are_read_are_an_error() {
    let folder = changed("llama3", |_| {});
    let opened = HfFolder::open(folder.path()).unwrap();
    let path = folder.path().join("model.safetensors");
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5000).unwrap();
    let read = |(name, foreign): (&str, &models::names::Foreign)| {
        let shape = foreign.our_shape();
        let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        opened.read_bytes(name, &shape, &whole).err().map(|error| error.to_string())
    };
    let errors: Vec<String> = opened.config().hf_names().iter().filter_map(read).collect();
    assert!(errors.len() > 5, "{errors:?}");
    assert!(errors.iter().all(|error| error.contains("model.safetensors: ends at byte 5000, ")), "{errors:?}");
}
