//! `.ci/gpu` and its runs without a GPU: how they judge what programs that stand in for the real ones say and leave
//! behind.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../.ci").join(name)
}

fn program(path: &Path, body: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/usr/bin/env bash\n{body}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn said(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned()).concat()
}

/// Two GPUs, and programs that do `body`, with the program's name in `$name`.
fn gpu(folder: &Path, body: &str, arguments: &str) -> Output {
    program(
        &folder.join("path/nvidia-smi"),
        "case $* in *list-gpus*) echo GPU 0; echo GPU 1 ;; *) echo 143771 ;; esac",
    );
    let body = format!("name=${{0##*/}}\n{body}");
    program(&folder.join("bin/burn-megatron"), &body);
    program(&folder.join("bin/gpu_check"), &body);
    let path = format!("{}:{}", folder.join("path").display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(script("gpu"));
    command.args(arguments.split_whitespace()).env("PATH", path).env("BURN_MEGATRON_BIN", folder.join("bin"));
    command.env("BURN_MEGATRON_GPU_OUT", folder.join("out")).env_remove("CUDA_VISIBLE_DEVICES").output().unwrap()
}

#[test]
fn one_wrong_program_is_in_the_table_and_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let body = "[[ $name/$1 == gpu_check/fp8 ]] && { echo it is BAD; exit 1; }
        echo 9 of 9 layouts equal, on $CUDA_VISIBLE_DEVICES";
    let output = gpu(folder.path(), body, "verify-llama fp8 doctor");
    let table = said(&output);
    assert_eq!(output.status.code(), Some(1), "{table}");
    let line =
        |name: &str| table.lines().rfind(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name}: {table}"));
    assert!(line("fp8").contains("WRONG (1)") && line("fp8").contains("it is BAD"), "{table}");
    assert!(line("doctor").contains("ok") && line("doctor").ends_with(" on 0"), "one GPU: {table}");
    assert!(line("verify-llama-f64").ends_with("equal, on"), "all GPUs: {table}");
    assert!(table.contains("1 of 5 went wrong"), "{table}");

    let output = gpu(folder.path(), "echo fine", "verify-llama fp8 doctor");
    assert!(output.status.success() && said(&output).contains("nothing of 5 is wrong"), "{}", said(&output));
}

#[test]
fn what_does_not_fit_into_the_time_is_left_out_and_no_fault() {
    let folder = tempfile::tempdir().unwrap();
    let body = "[[ $* == *--links* ]] && sleep 60; echo fine";
    let output = gpu(folder.path(), body, "--seconds 12 links bench-8b fp8");
    let table = said(&output);
    assert!(output.status.success(), "{table}");
    assert!(table.contains("\nlinks ") && table.contains("no more time"), "{table}");
    assert!(table.contains("left out for lack of time: fp8 bench-8b-dp bench-8b-tp"), "{table}");
    assert!(said(&gpu(folder.path(), "", "nonsense")).contains("no job has one of these words"));
}

/// A run with one step of the second half, and the hash of a file; `loss` is that of a resumed run.
fn resume(folder: &Path, loss: &str, hash: &str) -> Output {
    let body = format!(
        r#"while (($#)); do case $1 in --output.directory) out=$2 ;; --checkpoint.resume) goes_on=yes ;; esac; shift; done
           mkdir -p $out/checkpoints/step_00000012
           loss=5.25 hash=aa; [[ ${{goes_on:-}} ]] && loss={loss} hash={hash}
           for step in 6 7 8 9 10 11 12; do
               echo '{{"kind":"train","step":'$step',"loss":'$loss',"grad_norm":1.5,"seconds":'$RANDOM',"memory":9,"tokens_per_second":'$RANDOM'}}'
           done > $out/steps.jsonl
           echo "$RANDOM manifest.json
$hash  rank_00000.safetensors" > $out/checkpoints/step_00000012/SHA256SUMS"#
    );
    program(&folder.join("burn-megatron"), &body);
    let mut command = Command::new(script("gpu-runs"));
    command.args(["resume", "dense"]).env("MEGA", folder.join("burn-megatron")).env("OUT", folder.join("runs"));
    command.output().unwrap()
}

#[test]
fn one_bit_of_a_run_that_goes_on_is_seen() {
    let folder = tempfile::tempdir().unwrap();
    let output = resume(folder.path(), "5.25", "aa");
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("same bits: 6 steps after the stop, 1 files"), "{}", said(&output));
    for (loss, hash) in [("5.250000000000001", "aa"), ("5.25", "ab")] {
        let output = resume(folder.path(), loss, hash);
        assert!(!output.status.success() && !said(&output).contains("same bits"), "{}", said(&output));
    }
}

#[test]
fn a_hugging_face_folder_goes_round_on_cpu_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(script("gpu-runs"));
    command.arg("hf").env("MEGA", env!("CARGO_BIN_EXE_burn-megatron")).env("OUT", folder.path());
    let output = command.env("DEVICE", "cpu").env("RANKS", "2").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("the trained folder continues: The layout"), "{}", said(&output));
}
