//! What has no moments, or such as the other system has no place for.

use std::fs;
use std::path::Path;

use burn_megatron::checkpoint::{Kind, RunState, Saver, SaverOptions};
use serde_json::json;

use super::{copied, imported, tensors};
use crate::round_trip::{fail, succeed, text};

#[test]
fn moments_of_experts_go_to_torch_too() {
    let (folder, root) = (copied("megatron_experts"), tempfile::tempdir().unwrap());
    let [from, out, again] = ["from", "out", "again"].map(|name| root.path().join(name));
    let checkpoint = imported(folder.path(), &from).0;
    let options = ["--checkpoint", text(&from), "--optimizer"];
    succeed(&[&["export", "--dcp", text(&out)], &options[..]].concat());
    assert!(tensors(&imported(&out, &again).0) == tensors(&checkpoint));
}

#[test]
fn moments_of_another_optimizer_do_not_go_out() {
    let (folder, root) = (copied("adamw"), tempfile::tempdir().unwrap());
    let [from, lion, out] = ["from", "lion", "out"].map(|name| root.path().join(name));
    let state = imported(folder.path(), &from).0.state().clone();
    let config = json!({"optimizer": {"kind": "lion"}});
    let saver = Saver::new(&lion, 1, SaverOptions::default()).unwrap();
    saver.submit(0, Vec::new(), &RunState { config, ..state }).unwrap();
    saver.wait().unwrap();
    let export = |from: &Path| fail(&["export", "--dcp", text(&out), "--checkpoint", text(from), "--optimizer"]);
    assert!(export(&lion).contains("has optimizer.kind = \"lion\"; legal: \"adamw\""), "{}", export(&lion));
    // Nor do those of a run whose learning rate nobody knows.
    assert!(export(&from).contains("does not say its schedule of the learning rate"), "{}", export(&from));
}

/// Names of another length would not fit into the pickle.
pub fn renamed(folder: &Path, from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let path = folder.join(".metadata");
    let mut bytes = fs::read(&path).unwrap();
    let mut found = 0;
    for at in 0..bytes.len() - from.len() {
        if bytes[at..].starts_with(from.as_bytes()) {
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
            found += 1;
        }
    }
    assert!(found > 0, "{from}");
    fs::write(path, bytes).unwrap();
}

#[test]
fn what_cannot_continue_is_named() {
    let to = tempfile::tempdir().unwrap();
    let import = |folder: &Path, more: &[&str]| {
        fail(&[&["import", "--hf", text(folder), "--output", text(&to.path().join("x")), "--optimizer"], more].concat())
    };
    let consumed = ["--consumed-samples", "80"];
    says!(import(copied("adamw").path(), &[]), "give --consumed-samples, for 10 steps");

    let folder = copied("adamw");
    renamed(folder.path(), "exp_avg_sq", "square_avg");
    says!(import(folder.path(), &consumed), "square_avg` is a state of another optimizer than AdamW");

    // Moments were dropped without a word.
    let folder = copied("adamw");
    renamed(folder.path(), "optim.state.model.", "optim.state.m0del.");
    renamed(folder.path(), "optim.state.lm_head.", "optim.state.lm_h3ad.");
    says!(import(folder.path(), &consumed), "` is a state of no weight that config.json describes: save the optimizer");

    let folder = copied("adamw");
    renamed(folder.path(), "optim.state.model.norm.weight.exp_avg_sq", "train.state.model.other.weight.expavg_sq");
    let message = import(folder.path(), &consumed);
    says!(message, "tensor `model.norm.weight` has one moment; AdamW has exp_avg and exp_avg_sq");

    let folder = copied("megatron_reshardable");
    renamed(
        folder.path(),
        "optimizer.state.exp_avg.output_layer.weight",
        "optimizer.distributed.dp_group_idx_0.gbuf_0",
    );
    says!(import(folder.path(), &[]), "optimizer.distributed.dp_group_idx_0.gbuf_0` is a buffer of some ranks");

    // Tensor-parallel ranks in another order.
    let folder = copied("megatron_buckets");
    renamed(folder.path(), "dp_group_idx_0.gbuf", "dp_group_idx_9.gbuf");
    says!(
        import(folder.path(), &[]),
        "the optimizer: the buffers of 2 ranks (dp_reshardable) are not those of these weights"
    );
    let experts = copied("megatron_expert_buckets");
    renamed(
        experts.path(),
        "chained_1.optimizer.distributed.dp_group_idx_0.gbuf",
        "chained_1.optimizer.distributed.dp_group_idx_9.gbuf",
    );
    says!(import(experts.path(), &[]), "the optimizer of the experts: the buffers of 2 ranks (dp_reshardable)");
    renamed(folder.path(), "bucket_idx_0.exp_avg_sq", "bucket_idx_0.other_stat");
    says!(import(folder.path(), &[]), "other_stat` is a state of another optimizer than AdamW");

    let folder = copied("megatron_reshardable");
    fs::remove_file(folder.path().join("common.pt")).unwrap();
    assert!(import(folder.path(), &[]).contains("common.pt: cannot be read"));

    let plain = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf/llama3");
    assert!(import(&plain, &[]).contains("has no .metadata: moments come from DCP folders"));
}

#[test]
fn a_folder_without_moments_gives_weights_only() {
    let (folder, to) = (copied("adamw"), tempfile::tempdir().unwrap());
    renamed(folder.path(), "optim.state.", "other.thing.");
    let (checkpoint, said) = imported(folder.path(), to.path());
    says!(said, "no moments of an optimizer there: weights only");
    assert!(checkpoint.state().step == 0 && checkpoint.tensors().iter().all(|tensor| tensor.kind == Kind::Weight));
    // Nor can they go out.
    let message =
        fail(&["export", "--dcp", text(&to.path().join("out")), "--checkpoint", text(to.path()), "--optimizer"]);
    says!(message, "has no moments: its run has not updated the weights yet");
}
