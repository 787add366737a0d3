//! `burn-megatron train` in several processes, started as torchrun starts them.

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Child;
use std::time::Duration;

use burn_megatron::checkpoint::Checkpoint;
use serde_json::Value;

use super::{Ended, PROGRAM, Process, all, command, command_of, ended, run};

const STEPS: u64 = 12;

pub(super) fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..400).map(|i| format!("Line {i} says that {i} times {i} is {}.\n\n", i * i)).collect();
    fs::write(folder.path().join("book.txt"), text).unwrap();
    let config = "[model]\npreset = \"tiny\"\n[parallel]\ntp = 2\nsp = true\ndp = 2\nzero = 1\n[training]\nglobal-batch = 4\nseq-length = 32\n\
                  [lr]\nmax = 1e-2\nwarmup = 4\n[data]\ntext = [\"book.txt\"]\ntokenizer = \"byte\"\n[evaluation]\nevery = 4\nbatches = 1\n";
    fs::write(folder.path().join("run.toml"), config).unwrap();
    folder
}

pub(super) fn train(name: &str) -> String {
    format!("train run.toml --output.directory {name} --training.steps {STEPS} --checkpoint.every 3")
}

pub(super) fn succeed(folder: &Path, arguments: &str, processes: usize) {
    let all = run(folder, arguments, processes);
    for (process, Ended { status, stdout, stderr }) in all.iter().enumerate() {
        assert!(status.success(), "process {process} of {processes}: {stdout}{stderr}");
        let speaks = process == 0;
        assert_eq!(!stdout.is_empty(), speaks, "process {process} of {processes}: {stdout}");
    }
}

/// Loss and gradient norm of every step, the last time it was done, as they were written.
pub(super) fn steps(folder: &Path, name: &str) -> Vec<[String; 2]> {
    let log = fs::read_to_string(folder.join(name).join("steps.jsonl")).unwrap();
    let mut steps = vec![Default::default(); STEPS as usize];
    for line in log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        if line["kind"] == "train" {
            let step = line["step"].as_u64().unwrap() as usize;
            steps[step - 1] = ["loss", "grad_norm"].map(|key| line[key].to_string());
        }
    }
    steps
}

pub(super) fn tensors(folder: &Path, name: &str) -> Vec<(String, Vec<u8>)> {
    let checkpoint = Checkpoint::open(folder.join(name).join("checkpoints")).unwrap();
    assert_eq!(checkpoint.state().step, STEPS);
    checkpoint.verify(0, 1).unwrap();
    let whole = |shape: &[usize]| shape.iter().map(|&size| 0..size).collect::<Vec<_>>();
    let all = checkpoint.tensors().iter().map(|tensor| {
        let shape = &tensor.global_shape;
        let (_, bytes) = checkpoint.read(tensor.kind, &tensor.name, shape, &whole(shape)).unwrap();
        (format!("{}/{}", tensor.kind, tensor.name), bytes)
    });
    all.collect()
}

#[test]
fn several_processes_train_and_save_the_bits_of_one_and_outlive_a_killed_one() {
    let folder = folder();
    let folder = folder.path();
    let alone = command(folder, &train("alone"), None).spawn().unwrap();
    let alone = ended(alone, Duration::from_secs(240));
    assert!(alone.status.success(), "{}{}", alone.stdout, alone.stderr);
    for processes in [2, 4] {
        let name = format!("processes{processes}");
        succeed(folder, &format!("{} --trace {name}.json", train(&name)), processes);
        assert_eq!(steps(folder, &name), steps(folder, "alone"), "{processes} processes");
        assert!(tensors(folder, &name) == tensors(folder, "alone"), "{processes} processes");
        let trace: Value =
            serde_json::from_str(&fs::read_to_string(folder.join(format!("{name}.json"))).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let ranks: std::collections::BTreeSet<_> = events.iter().filter_map(|event| event["tid"].as_u64()).collect();
        assert_eq!(ranks.len(), 4, "the timeline has all ranks");
    }

    // A process is killed in the middle; the others end and say which it was.
    for (victim, step) in [(0, 5), (2, 9)] {
        let mut all = run(folder, &format!("{} --inject kill:rank{victim}@step{step}", train("killed")), 4);
        assert_eq!(all.remove(victim).status.signal(), Some(9));
        for Ended { status, stderr, .. } in all {
            assert!(!status.success());
            says!(stderr, &format!("process {victim} on "), "is gone", &format!("(rank {victim})"));
        }
    }
    succeed(folder, &train("killed"), 2);
    assert_eq!(steps(folder, "killed"), steps(folder, "alone"), "resumed by other processes");
    assert!(tensors(folder, "killed") == tensors(folder, "alone"));
}

#[test]
fn a_run_that_ends_at_its_time_or_interval_does_so_in_all_processes_and_continues() {
    let folder = folder();
    let folder = folder.path();
    succeed(folder, &train("alone"), 1);
    let over = "training.exit-duration-in-mins is over";
    for (flags, step, said) in [
        ("--training.exit-duration-in-mins 1e-6", 1, over),
        ("--training.exit-duration-in-mins 1e-6 --training.exit-interval 7", 2, over),
        ("--training.exit-interval 5", 5, "the run ends after step 5: training.exit-interval = 5"),
        ("--training.exit-interval 5 --training.exit-duration-in-mins 1e300", 10, "training.exit-interval = 5"),
    ] {
        for (process, Ended { status, stdout, stderr }) in
            run(folder, &format!("{} {flags}", train("ends")), 2).into_iter().enumerate()
        {
            assert!(status.success(), "{stdout}{stderr}");
            assert!(process != 0 || stdout.contains(said) && stdout.contains("ended before its last step"), "{stdout}");
        }
        assert_eq!(Checkpoint::open(folder.join("ends/checkpoints")).unwrap().state().step, step, "{flags}");
    }
    succeed(folder, &format!("{} --training.exit-interval 12", train("ends")), 2);
    assert_eq!(steps(folder, "ends"), steps(folder, "alone"));
    assert!(tensors(folder, "ends") == tensors(folder, "alone"));
}

#[test]
fn a_process_that_does_not_come_or_is_another_run_is_named_by_all() {
    let folder = folder();
    let folder = folder.path();
    let four = all(4);
    let mut children = Vec::new();
    for process in four.iter().filter(|process| process.process != 2) {
        children
            .push(command(folder, &train("late"), Some(process)).env("BURN_MEGATRON_TIMEOUT", "2").spawn().unwrap());
    }
    for child in children {
        let Ended { status, stderr, .. } = ended(child, Duration::from_secs(60));
        assert!(!status.success() && stderr.contains("process 2 of 4 did not come"), "{stderr}");
    }

    for (flags, said) in [
        (["--data-parallel 2", "--data-parallel 4"], ["has layout TP2 SP DP2 ZeRO1", "has layout TP2 SP DP4 ZeRO1"]),
        (["--lr.min 1e-3", "--lr.min 2e-3"], ["has configuration lr.min = 0.001", "has configuration lr.min = 0.002"]),
    ] {
        let two = all(2);
        let start = |(process, flags): (&Process, &&str)| {
            command(folder, &format!("{} {flags}", train("other")), Some(process)).spawn().unwrap()
        };
        let children: Vec<Child> = two.iter().zip(&flags).map(start).collect();
        for child in children {
            let Ended { status, stderr, .. } = ended(child, Duration::from_secs(60));
            assert!(!status.success() && said.iter().all(|part| stderr.contains(part)), "{stderr}");
        }
    }
    assert!(!folder.join("other").exists() && !folder.join("late").exists(), "nothing was written");
}

#[test]
fn what_goes_wrong_before_the_run_ends_all_processes() {
    let folder = folder();
    let folder = folder.path();
    // Process 0 alone reads the text first: it has a token that the model lacks.
    let all = run(folder, &format!("{} --model.vocab-size 64", train("wrong")), 2);
    for Ended { status, stderr, .. } in all {
        assert!(!status.success() && stderr.contains("model.vocab-size = 64"), "{stderr}");
    }
    let all = run(folder, &train("wrong"), 3);
    for Ended { status, stderr, .. } in all {
        assert!(!status.success() && stderr.contains("cannot be shared out over 3 processes"), "{stderr}");
    }
}

#[test]
fn a_timeout_beyond_its_range_ends_every_process_and_names_the_range() {
    let folder = folder();
    let start = |process: &Process| {
        let mut command = command(folder.path(), &train("never"), Some(process));
        command.env("BURN_MEGATRON_TIMEOUT", "18446744073709551615").spawn().unwrap()
    };
    let children: Vec<Child> = all(4).iter().map(start).collect();
    for child in children {
        let Ended { status, stderr, .. } = ended(child, Duration::from_secs(60));
        let range = "BURN_MEGATRON_TIMEOUT = \"18446744073709551615\": expected a number of seconds, 1 to 604800";
        assert!(!status.success() && stderr.contains(range) && !stderr.contains("panicked"), "{stderr}");
    }
}

#[test]
fn processes_of_two_builds_are_refused_and_both_are_named() {
    let folder = folder();
    let folder = folder.path();
    // A build that differs in nothing but a byte.
    let other = folder.join("burn-megatron");
    fs::copy(PROGRAM, &other).unwrap();
    fs::OpenOptions::new().append(true).open(&other).unwrap().write_all(b"\n").unwrap();
    let start = |(process, program): (&Process, &Path)| {
        command_of(program, folder, &train("builds"), Some(process)).spawn().unwrap()
    };
    let two = all(2);
    let children: Vec<Child> = two.iter().zip([Path::new(PROGRAM), &other]).map(start).collect();
    let bytes = fs::metadata(PROGRAM).unwrap().len();
    for child in children {
        let Ended { status, stderr, .. } = ended(child, Duration::from_secs(60));
        assert!(!status.success(), "{stderr}");
        for words in [
            "process 0 on ",
            &format!("has executable of {bytes} bytes with the checksum "),
            "but process 1 on ",
            &format!("has executable of {} bytes with the checksum ", bytes + 1),
        ] {
            assert!(stderr.contains(words), "`{words}` is missing in: {stderr}");
        }
    }
    assert!(!folder.join("builds").exists(), "nothing was written");
}
