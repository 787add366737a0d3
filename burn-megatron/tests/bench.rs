//! `burn-megatron bench`, as a user types it.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(folder: &Path, arguments: &str) -> Output {
    let command = Path::new(env!("CARGO_BIN_EXE_burn-megatron"));
    Command::new(command).current_dir(folder).arg("bench").args(arguments.split_whitespace()).output().unwrap()
}

/// Standard output and error of a measurement that must not fail.
fn succeed(folder: &Path, arguments: &str) -> [String; 2] {
    let output = bench(folder, arguments);
    let [table, told] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{arguments}: {table}{told}");
    [table, told]
}

#[test]
fn a_recipe_on_cpu_ranks_gives_a_table_a_record_and_a_row() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "tiny --gpus 4 --tensor-parallel 2 --zero 1 --steps 2 --warmup 1 --runs 2 --out results/tiny.json";
    let [table, told] = succeed(folder.path(), arguments);
    assert!(told.contains("step 5/5"), "{told}");
    for part in ["TP2 DP2 ZeRO1", "tokens/s/rank", "TFLOP/s/rank", "CPU rank", "planned", arguments] {
        assert!(table.contains(part), "{part} in {table}");
    }
    assert!(!table.contains("MFU") && !table.contains("GPU idle"), "{table}");
    let record: Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("results/tiny.json")).unwrap()).unwrap();
    let (planned, used) = (&record["memory"]["planned"], &record["memory"]["used"]);
    let [planned, used] = [planned, used].map(|bytes| bytes.as_f64().unwrap());
    assert!(used > 0.5 * planned && used < 2.0 * planned, "{}", record["memory"]);
    assert_eq!(record["runs"].as_array().unwrap().len(), 2);
    let row = std::fs::read_to_string(folder.path().join("results/tiny.md")).unwrap();
    assert!(row.starts_with("| date | commit |") && row.contains(arguments), "{row}");
    // Without another system's measurement there are no bars.
    let output = bench(folder.path(), "--chart chart.svg results/tiny.json");
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && told.contains("--chart: nothing to compare"), "{told}");
    assert!(!folder.path().join("chart.svg").exists());
}

#[test]
fn several_layouts_are_one_table() {
    let folder = tempfile::tempdir().unwrap();
    let arguments = "tiny --layouts=DP2+ZeRO1,TP2+SP --steps 2 --warmup 1 --runs 1 --out results/tiny.json";
    let [table, _] = succeed(folder.path(), arguments);
    let last: Vec<&str> = table.trim_end().lines().rev().take(3).collect();
    assert!(last[2].starts_with("layout") && last[2].contains("tokens/s/rank"), "{table}");
    assert!(last[1].starts_with("DP2 ZeRO1") && last[0].starts_with("TP2 SP"), "{table}");
    for (file, tokens) in [("tiny-dp2-zero1", 128), ("tiny-tp2-sp", 128)] {
        let record = std::fs::read(folder.path().join(format!("results/{file}.json"))).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        assert_eq!(record["setup"]["tokens_per_rank"], tokens, "{file}");
    }
}

/// Every file of `benchmarks` is a run, and a dry run says without a GPU how its documents would be assigned.
#[test]
fn a_dry_run_measures_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let benchmarks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benchmarks");
    let dry = |file: &Path, arguments: &str| {
        let [table, _] = succeed(folder.path(), &format!("{} --device cuda --dry-run {arguments}", file.display()));
        table
    };
    let files = std::fs::read_dir(&benchmarks).unwrap().map(|entry| entry.unwrap().path());
    let files: Vec<_> = files.filter(|file| file.extension().is_some_and(|end| end == "toml")).collect();
    assert!(files.len() >= 5, "{files:?}");
    for file in &files {
        let table = dry(file, "");
        assert!(table.contains("memory by plan") && table.contains(" GiB"), "{table}");
    }
    let ways = "--document-lengths lognormal:4096,1.1 --context.dynamic true --context.max-tokens-per-rank 16384";
    let table = dry(&benchmarks.join("skewed-8b.toml"), ways);
    for part in ["documents             18.5", "dynamic:16384 1.030", "CP2 DP1 1.110, CP1 DP2 1.046"] {
        assert!(table.contains(part), "{part} in {table}");
    }
    let forced = dry(&benchmarks.join("mixtral-12b.toml"), "--performance.moe-router-force-load-balancing true");
    assert!(forced.contains("forced load balancing"), "{forced}");
    let left = dry(&benchmarks.join("qwen3-moe-11b.toml"), "--fp8.format hybrid --fp8.experts false");
    assert!(left.contains("fp8 except experts"), "{left}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    for (arguments, said) in [
        ("llama4", "recipes: llama3-8b, llama3-1b, tiny"),
        ("tiny --profile", "--profile works on GPUs only"),
        ("tiny --layouts=DP2,TP3+XP1", "--layouts \"TP3+XP1\""),
        ("tiny --layouts DP2 --gpus 4", "has 2 ranks, not --gpus 4"),
        ("tiny --layouts DP2 --zero 1", "--layouts and layout flags exclude each other"),
        ("tiny --runs 0", "--runs 0 measures nothing"),
        ("tiny --gpus 3 --tensor-parallel 2", "3 ranks are not a multiple of the 2 that hold a model"),
        ("tiny --gpus 2 --tensor-parallel 2 --model.num-key-value-heads 1 --model.num-attention-heads 3", "heads"),
    ] {
        let output = bench(folder.path(), arguments);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains(said), "{arguments}: {told}");
    }
    std::fs::write(folder.path().join("file"), "").unwrap();
    let output = bench(folder.path(), "tiny --steps 1 --warmup 1 --runs 1 --out file/record.json");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.starts_with("error: cannot write file: "), "it has measured: {told}");
}
