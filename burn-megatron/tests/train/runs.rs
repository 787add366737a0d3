//! Runs of plain Burn modules by the command line.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::command::{succeed, text};

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

/// What a training says that does not fail.
pub fn trained(folder: &Path, flags: &[&str]) -> String {
    let output = train(folder, flags);
    let [said, complained] = [&output.stdout, &output.stderr].map(|bytes| text(bytes));
    assert!(output.status.success(), "{flags:?}: {said}{complained}");
    said + &complained
}

/// What is said of a run that does not begin.
pub fn refused(folder: &Path, flags: &[&str]) -> String {
    let steps = folder.join("run/steps.jsonl");
    let (began, output) = (steps.exists(), train(folder, flags));
    assert!(!output.status.success(), "{flags:?}");
    assert!(began || !steps.exists(), "{flags:?} has begun");
    text(&output.stderr)
}

/// That these numbers are those of one rank in every layout. Gives the losses of one rank.
pub fn layouts_agree(folder: &Path, flags: &[&str], names: &[&str], layouts: &[&[&str]]) -> [Vec<f64>; 2] {
    let (run, other) = (folder.join("run"), folder.join("other"));
    trained(folder, flags);
    for layout in layouts {
        let _ = fs::remove_dir_all(&other);
        trained(folder, &[&["--output.directory", other.to_str().unwrap()], flags, *layout].concat());
        for name in names {
            for (alone, found) in logged(&run, name).iter().zip(&logged(&other, name)) {
                assert_eq!(alone.len(), found.len(), "{layout:?}");
                let furthest = alone.iter().zip(found).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(furthest < 1e-10, "{layout:?}: {name} {found:?}, not {alone:?}");
            }
        }
    }
    logged(&run, "loss")
}

/// That a run without its last checkpoint does the last steps again with the same bits, and that before it resumes `refuse`
/// finds what it may not.
pub fn resumes(folder: &Path, flags: &[&str], refuse: impl FnOnce()) {
    let run = folder.join("run");
    trained(folder, flags);
    let (whole, weights) = (logged(&run, "loss"), export(&run, &folder.join("whole")));
    for part in ["model", "optim", "scheduler"] {
        fs::remove_file(run.join(format!("checkpoints/{part}-3.bpk"))).unwrap();
    }
    refuse();
    let said = trained(folder, flags);
    assert!(said.contains("began after step 4 of 6"), "{said}");
    assert_eq!(logged(&run, "loss"), whole);
    assert!(export(&run, &folder.join("again")) == weights);
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
    succeed(run, &format!("export --checkpoint checkpoints --hf {}", to.display()));
    let bytes = fs::read(to.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    file.iter().map(|(name, tensor)| (name.to_string(), tensor.data().to_vec())).collect()
}
