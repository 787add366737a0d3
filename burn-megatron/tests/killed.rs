//! A run that is killed and started again ends with the bits of a run that was left alone.

use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use burn_megatron::checkpoint::{Checkpoint, Kind};
use serde_json::Value;

const STEPS: u64 = 96;

fn command(folder: &Path, name: &str, layout: &str) -> Command {
    let saves = if layout.contains("directory none") { "" } else { "--checkpoint.every 3 --checkpoint.keep-last 2" };
    let arguments = format!("train run.toml --output.directory {name} --training.steps {STEPS} {saves} {layout}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
    command.current_dir(folder).args(arguments.split_whitespace());
    command
}

fn finish(folder: &Path, name: &str, layout: &str) -> String {
    succeed(&mut command(folder, name, layout))
}

/// What a program says that must not fail.
fn succeed(program: &mut Command) -> String {
    let output = program.output().unwrap();
    let [said, errors] = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(output.status.success(), "{said}{errors}");
    said
}

/// What a program says that must fail.
fn fail(program: &mut Command) -> String {
    let output = program.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{:?} {said}", output.status);
    said
}

type Said = Lines<BufReader<ChildStdout>>;

/// Starts a run and waits until it says that it has done this step. No signal is ignored, also where the tests run under
/// `nohup`.
fn started(folder: &Path, name: &str, flags: &str, step: u64) -> (Child, Said) {
    let run = command(folder, name, flags);
    let mut env = Command::new("env");
    env.current_dir(folder).arg("--default-signal").arg(run.get_program()).args(run.get_args());
    let mut child = env.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let wanted = format!("step {step:>2}/{STEPS}");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with(&wanted)), "the run ended before step {step}");
    (child, lines)
}

/// A run that is killed before this step.
fn killed_before(folder: &Path, name: &str, step: u64) {
    let output = command(folder, name, &format!("--inject kill:rank1@step{step}")).output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{output:?}");
}

fn signal(child: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
}

/// Starts a run and asks it to end, as schedulers and terminals do: it saves, and its exit code says that it is not
/// done.
fn stop_after(folder: &Path, name: &str, step: u64, by: &str) {
    let (mut child, lines) = started(folder, name, "", step);
    signal(&child, by);
    let said: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(75), "{by}: {said:?}");
    assert!(said.iter().any(|line| line.starts_with("stopped before its last step")), "{said:?}");
    let saved = last_checkpoint(folder, name).state().step;
    assert!((step..STEPS).contains(&saved), "step {saved}");
}

/// The loss of every step, the last time it was done.
fn losses(folder: &Path, name: &str) -> Vec<String> {
    let log = fs::read_to_string(folder.join(name).join("steps.jsonl")).unwrap();
    let mut losses = vec![String::new(); STEPS as usize];
    for line in log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        if line["kind"] == "train" {
            losses[line["step"].as_u64().unwrap() as usize - 1] = line["loss"].to_string();
        }
    }
    losses
}

fn last_checkpoint(folder: &Path, name: &str) -> Checkpoint {
    Checkpoint::open(folder.join(name).join("checkpoints")).unwrap()
}

fn same_tensors(one: &Checkpoint, other: &Checkpoint) {
    for tensor in other.tensors() {
        let whole: Vec<_> = tensor.global_shape.iter().map(|&size| 0..size).collect();
        let bytes = |of: &Checkpoint| of.read(tensor.kind, &tensor.name, &tensor.global_shape, &whole).unwrap();
        assert!(bytes(one) == bytes(other), "{}/{}", tensor.kind, tensor.name);
    }
}

/// A folder with a run.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..400).map(|i| format!("Line {i} says that {i} times {i} is {}.\n\n", i * i)).collect();
    fs::write(folder.path().join("book.txt"), text).unwrap();
    let config = "[model]\npreset = \"tiny\"\n[parallel]\ntp = 2\nsp = true\ndp = 2\n[training]\nglobal-batch = 4\nseq-length = 32\n\
                  [lr]\nmax = 1e-2\nwarmup = 4\n[data]\ntext = [\"book.txt\"]\ntokenizer = \"byte\"\n[evaluation]\nevery = 8\nbatches = 1\n";
    fs::write(folder.path().join("run.toml"), config).unwrap();
    folder
}

#[test]
fn a_second_run_in_the_same_folder_is_refused_at_once() {
    let folder = folder();
    let (mut first, lines) = started(folder.path(), "both", "", 2);
    let said = fail(&mut command(folder.path(), "both", "--checkpoint.directory none"));
    let holder = format!("output.directory = both is in use by another run (process {} on ", first.id());
    assert!(said.contains(&holder), "{said}");
    lines.for_each(drop);
    assert!(first.wait().unwrap().success(), "the first one is not disturbed");
}

/// As `nohup` starts it: closing the terminal changes nothing.
#[test]
fn a_signal_that_is_ignored_stays_ignored() {
    let folder = folder();
    let mut run = command(folder.path(), "nohup", "");
    let program = run.get_program().to_owned();
    let mut shell = Command::new("sh");
    shell.current_dir(folder.path()).args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(program).args(run.get_args());
    let mut child = shell.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("step  3/")));
    signal(&child, "-HUP");
    lines.for_each(drop);
    assert!(child.wait().unwrap().success());
    assert_eq!(last_checkpoint(folder.path(), "nohup").state().step, STEPS);
    // The same command once more: all steps are done.
    succeed(&mut run);
}

#[test]
fn the_average_of_the_weights_is_exported_and_missed_where_there_is_none() {
    let folder = folder();
    finish(folder.path(), "average", "--lr.warmup 0 --training.steps 4 --training.ema-decay 0.5");
    finish(folder.path(), "weights", "--lr.warmup 0 --training.steps 2");
    let export = |run: &str, to: &str, flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_burn-megatron"));
        command.current_dir(folder.path()).args(["export", "--checkpoint"]).arg(format!("{run}/checkpoints"));
        command.args(["--hf", to]).args(flags);
        command
    };
    succeed(&mut export("average", "of-weights", &[]));
    succeed(&mut export("average", "of-average", &["--ema"]));
    let checkpoint = last_checkpoint(folder.path(), "average");
    for (kind, to) in [(Kind::Weight, "of-weights"), (Kind::Average, "of-average")] {
        let tensor = checkpoint.tensors().iter().find(|tensor| tensor.name == "embed_tokens.weight").unwrap();
        let whole: Vec<_> = tensor.global_shape.iter().map(|&size| 0..size).collect();
        let (_, bytes) = checkpoint.read(kind, &tensor.name, &tensor.global_shape, &whole).unwrap();
        let file = fs::read(folder.path().join(to).join("model.safetensors")).unwrap();
        assert!(file.windows(bytes.len()).any(|part| part == bytes), "{to} has another embedding");
    }
    let said = fail(&mut export("weights", "none", &["--ema", "--dtype", "bf16"]));
    assert!(said.contains("has no average of its weights: its run had no training.ema-decay"), "{said}");
}

#[test]
fn a_slow_rank_is_named_with_its_share_of_the_time() {
    let folder = folder();
    let said = finish(folder.path(), "slow", "--log.straggler true --inject slow:rank3:4x --training.steps 24");
    let lines: Vec<&str> = said.lines().filter(|line| line.starts_with("straggler in the last 10 steps: ")).collect();
    let named =
        |line: &&&str| line.contains(": rank 3 works ") && line.contains(" % of the time, the median of the ranks ");
    assert_eq!(lines.iter().filter(named).count(), 2, "{said}");
}

#[test]
fn a_rank_that_fails_is_named_and_all_begin_again_with_the_bits_of_a_run_that_was_left_alone() {
    let folder = folder();
    let flags = "--training.steps 24 --checkpoint.every 16";
    finish(folder.path(), "alone", flags);
    let flags = format!("{flags} --training.max-restarts 2 --checkpoint.non-persistent-every 3");
    let faults = "error:rank3@step11,panic:rank0@step18";
    let said = finish(folder.path(), "failed", &format!("{flags} --inject {faults}"));
    for words in [
        "rank 3 (dp 1, tp 1) failed: fault error:rank3@step11 of --inject; running; its last operation was broadcast",
        "; all ranks begin again with step 10, from memory; 1 restart left",
        "rank 0 (dp 0, tp 0) panicked: fault panic:rank0@step18 of --inject",
        "; all ranks begin again with step 17, from failed/checkpoints/step_00000016; 0 restarts left",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    assert_eq!(losses(folder.path(), "failed"), losses(folder.path(), "alone"));
    same_tensors(&last_checkpoint(folder.path(), "failed"), &last_checkpoint(folder.path(), "alone"));
}

/// An evaluation lies between the step that is rolled back to and the one that fails.
#[test]
fn steps_that_are_done_again_are_printed_with_their_numbers() {
    let folder = folder();
    for (name, last, flags) in [
        ("back", 10, "--inject nan@10 --anomaly.non-finite roll-back"),
        ("again", 9, "--inject error:rank1@step10 --training.max-restarts 1"),
    ] {
        let flags = format!("{flags} --training.steps 16 --checkpoint.every 6");
        let said = finish(folder.path(), name, &flags);
        let number = |line: &str| line.strip_prefix("step ")?.split('/').next()?.trim().parse().ok();
        let numbers: Vec<u64> = said.lines().filter_map(number).collect();
        assert!(numbers.into_iter().eq((1..=last).chain(7..=16)), "{said}");
        assert_eq!(said.matches("validation after step  8/16").count(), 2, "{said}");
    }
}

#[test]
fn a_run_without_checkpoints_that_is_stopped_says_that_nothing_is_saved() {
    let folder = folder();
    let (mut child, lines) = started(folder.path(), "none", "--checkpoint.directory none", 2);
    signal(&child, "-TERM");
    let said: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{said:?}");
    let told = "stopped before its last step; nothing is saved, because checkpoint.directory = none";
    assert!(said.iter().any(|line| line == told), "{said:?}");
    assert!(!said.iter().any(|line| line.starts_with("held-out loss")), "there is no time for it: {said:?}");
}

#[test]
fn a_save_that_has_failed_is_said_when_a_rank_fails_before_it_was() {
    let folder = folder();
    // There is time to take the folder of checkpoints away before the first save.
    let faults = "--inject slow:rank3:50x,error:rank1@step4 --training.max-restarts 1";
    let mut run = command(folder.path(), "failed", &format!("--training.steps 6 {faults}"));
    let mut child = run.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.starts_with("step 1/6")));
    fs::remove_dir_all(folder.path().join("failed/checkpoints")).unwrap();
    let said = lines.collect::<Vec<_>>().join("\n");
    assert!(child.wait().unwrap().success(), "{said}");
    let line = said.lines().find(|line| line.starts_with("a checkpoint was not saved: ")).expect(&said);
    assert!(line.contains("cannot create") && line.contains("step_00000003"), "{line}");
    assert!(said.contains("; all ranks begin again with step 1, from its start; 0 restarts left"), "{said}");
    assert_eq!(last_checkpoint(folder.path(), "failed").state().step, 6);
}

#[test]
fn a_rank_that_hangs_ends_its_process_after_the_timeout() {
    let folder = folder();
    let flags = "--inject hang:rank1@step3 --training.distributed-timeout-minutes 0.1";
    let said = fail(&mut command(folder.path(), "hangs", flags));
    // Not as long again: the others are out, and this one hangs.
    assert!(said.contains(" waited 6 s in ") && said.contains("did not stop within 3 s"), "{said}");
}

#[test]
fn a_fault_that_cannot_happen_is_refused_with_the_nearest_that_can() {
    let folder = folder();
    let said = fail(&mut command(folder.path(), "refused", "--inject kill:rank4@step2"));
    let refused = format!("there are ranks 0 to 3 and steps 1 to {STEPS}; nearest legal: kill:rank3@step2");
    assert!(said.contains(&refused), "{said}");
}

#[test]
fn a_limit_of_the_size_of_files_is_an_error_that_is_named() {
    let folder = folder();
    let run = command(folder.path(), "limited", "");
    let mut shell = Command::new("bash");
    let limit = ["-c", "ulimit -f 60; exec \"$@\"", "bash"];
    let said = fail(shell.current_dir(folder.path()).args(limit).arg(run.get_program()).args(run.get_args()));
    assert!(said.contains("a limit of the size of files is reached") && said.contains("checkpoints"), "{said}");
}

#[test]
fn a_killed_run_ends_with_the_bits_of_one_that_was_left_alone() {
    let folder = folder();
    finish(folder.path(), "alone", "");
    // Three times, the last two while a save is being written.
    for step in [3, 7, 25] {
        killed_before(folder.path(), "killed", step);
    }
    stop_after(folder.path(), "killed", 30, "-TERM");
    stop_after(folder.path(), "killed", 45, "-HUP");
    finish(folder.path(), "killed", "");

    assert_eq!(losses(folder.path(), "killed"), losses(folder.path(), "alone"));
    let (alone, killed) = (last_checkpoint(folder.path(), "alone"), last_checkpoint(folder.path(), "killed"));
    assert_eq!(killed.state().step, STEPS);
    assert_eq!((killed.state().consumed_samples, killed.state().updates), (STEPS * 4, STEPS));
    same_tensors(&killed, &alone);

    // Another layout may take over.
    killed_before(folder.path(), "moved", 13);
    finish(folder.path(), "moved", "--tensor-parallel 1 --sequence-parallel=false --data-parallel 4");
    assert_eq!(last_checkpoint(folder.path(), "moved").state().layout.to_string(), "DP4");
    for (moved, alone) in losses(folder.path(), "moved").iter().zip(losses(folder.path(), "alone")) {
        let (moved, alone): (f64, f64) = (moved.parse().unwrap(), alone.parse().unwrap());
        assert!((moved - alone).abs() < 1e-4 * alone, "{moved} instead of {alone}");
    }
}
