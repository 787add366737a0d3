//! Runs of plain Burn modules by the command line.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

pub const TP: &str = "--parallel.tensor-parallel";
pub const SP: &str = "--parallel.sequence-parallel";
pub const PP: &str = "--parallel.pipeline-parallel";
pub const DP: &str = "--parallel.data-parallel";
pub const ZERO: &str = "--parallel.zero";

/// `train` of the file `run.toml` on CPU ranks.
pub fn train(folder: &Path, flags: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.arg("train").arg(folder.join("run.toml")).args(["--device", "cpu"]).args(flags).output().unwrap()
}

/// A number of every step, and of every evaluation.
pub fn logged(run: &Path, name: &str) -> [Vec<f64>; 2] {
    let text = fs::read_to_string(run.join("steps.jsonl")).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    ["train", "valid"].map(|kind| {
        let of_kind = lines.iter().filter(|line| line["kind"] == kind);
        of_kind.map(|line| line[name].as_f64().unwrap_or_else(|| panic!("{name} in {line}"))).collect()
    })
}

/// The weights of the last checkpoint, written as a Hugging Face folder.
pub fn export(run: &Path, to: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.args(["export", "--checkpoint"]).arg(run.join("checkpoints")).arg("--hf").arg(to);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let bytes = fs::read(to.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(name, tensor)| (name.to_string(), tensor.data().to_vec())).collect()
}
