//! The same trainings in several processes, started as torchrun starts them.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use burn::train::TrainingStrategy;
use burn::train::metric::store::Split;
use burn_megatron::prelude::*;

use crate::classifier::{Classifier, Trap};
use crate::cpu;
use crate::setup::{Setup, difference};
use crate::training::{metric, validation_batches};

/// What a process does, as words: the layout, with `stages` a pipeline, with `devices` one given for each of its ranks.
const WORDS: &str = "MESH_STRATEGY_TEST";
const FOLDER: &str = "MESH_STRATEGY_FOLDER";

fn layout(words: &str) -> ParallelLayout {
    words.split(',').next().unwrap().parse().unwrap()
}

fn strategy(words: &str, processes: usize) -> TrainingStrategy<Classifier> {
    let layout = layout(words);
    if words.contains("devices") {
        return MegatronStrategy::zero_on(layout.zero, vec![cpu(); layout.dp / processes]);
    }
    let mut mesh = MegatronStrategy::mesh(layout).units(Units::auto().keep_below(2));
    if words.contains("overlap") {
        mesh = mesh.overlap_grad_reduce().bucket_size(1000);
    }
    if words.contains("sync") {
        mesh = mesh.sync_batch_norm();
    }
    match words.split(',').find(|word| matches!(*word, "stages" | "across")) {
        Some("across") => mesh.micro_batches(2).stages().across_processes().into(),
        Some(_) => mesh.micro_batches(2).stages().into(),
        None => mesh.into(),
    }
}

/// 18 items in batches of 4 over two epochs; with `resume` the third and fourth after them.
fn setup(words: &str) -> Setup {
    let has = |word: &str| words.split(',').any(|other| other == word);
    let mut setup = Setup { layers: if has("stages") || has("across") { 2 } else { 1 }, ..Setup::default() };
    (setup.groups, setup.norm) = (has("groups"), has("norm"));
    if has("checkpoints") {
        setup.checkpoints = Some(None);
    }
    if has("resume") {
        (setup.epochs, setup.checkpoints) = (4, Some(Some(2)));
    }
    if has("uninterrupted") {
        setup.epochs = 4;
    }
    setup
}

/// What one of the processes does that the tests below start.
fn one_process(words: &str, folder: &Path) {
    let process: usize = std::env::var("RANK").unwrap().parse().unwrap();
    let processes = std::env::var("WORLD_SIZE").unwrap().parse().unwrap();
    let mut setup = setup(words);
    match words.split(',').next_back().unwrap() {
        "panic" if process == 1 => setup.trap = Trap { panic_at: Some(3), ..Trap::default() },
        "killed" if process == 1 => setup.trap = Trap { exit_at: Some(3), ..Trap::default() },
        "other" if process == 1 => setup.layers = 3,
        "items" if process == 1 => setup.items = (0..20).collect(),
        _ => {}
    }
    // Other values than those of the first process must not matter.
    let strategy = strategy(words, processes);
    let result = setup.run_with(&folder.join("run"), strategy, 1.0 + process as f64);
    let text = match result.error {
        Some(error) => error.to_string(),
        None => result.model.numbers().iter().map(|value| value.to_bits().to_string()).collect::<Vec<_>>().join(" "),
    };
    let steps = setup.trap.steps.load(Ordering::SeqCst);
    fs::write(folder.join(format!("result{process}")), format!("{steps}\n{text}")).unwrap();
}

fn start(folder: &Path, words: &str, processes: usize) -> Vec<Child> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let child = |process: usize| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::processes_that_are_not_to_do_the_same_are_refused"]);
        command.env(WORDS, words).env(FOLDER, folder).env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
        let [process, processes] = [process, processes].map(|number| number.to_string());
        command.env("RANK", &process).env("LOCAL_RANK", &process);
        command.env("WORLD_SIZE", &processes).env("LOCAL_WORLD_SIZE", &processes);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    (0..processes).map(child).collect()
}

/// How many steps each process took, and what its training ended with.
fn run(folder: &Path, words: &str, processes: usize) -> Vec<(usize, String)> {
    let begun = Instant::now();
    for mut child in start(folder, words, processes) {
        while child.try_wait().unwrap().is_none() {
            if begun.elapsed() > Duration::from_secs(120) {
                child.kill().unwrap();
                panic!("{words}: a process was still running after {:?}", begun.elapsed());
            }
            sleep(Duration::from_millis(10));
        }
    }
    let result = |process: usize| {
        let text = fs::read_to_string(folder.join(format!("result{process}"))).unwrap_or_default();
        let (steps, text) = text.split_once('\n').unwrap_or_default();
        (steps.parse().unwrap_or_default(), text.to_string())
    };
    (0..processes).map(result).collect()
}

fn numbers(text: &str) -> Vec<f64> {
    let value = |bits: &str| f64::from_bits(bits.parse().unwrap_or_else(|_| panic!("{text}")));
    text.split(' ').map(value).collect()
}

#[test]
fn several_processes_train_as_one() {
    for (words, processes) in [
        ("DP2 ZeRO1", 2),
        ("DP2 ZeRO1,devices", 2),
        ("DP4 ZeRO2", 2),
        ("DP2 ZeRO3", 2),
        ("TP2", 2),
        ("TP2 DP2", 2),
        ("TP2 SP DP2 ZeRO1", 4),
        ("PP2 DP2,stages", 2),
        ("PP2 DP2 ZeRO1,stages", 2),
        ("PP2 DP2 ZeRO3,stages", 2),
        ("PP2,across", 2),
        ("DP2 ZeRO1,groups", 2),
        ("DP2 ZeRO3,groups", 2),
        ("PP2,across,groups", 2),
        ("PP2,across,norm", 2),
        ("PP2 DP2,stages,overlap", 2),
        ("PP2 DP2 ZeRO1,across,norm,sync,overlap", 4),
        ("TP2 PP2 DP2 ZeRO2,across", 4),
    ] {
        let (one, many) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let alone = setup(words).run(&one.path().join("run"), strategy(words, 1)).model.numbers();
        let results = run(many.path(), words, processes);
        for (process, (_, text)) in results.iter().enumerate() {
            let gap = difference(&numbers(text), &alone);
            assert!(gap < 1e-10, "{words}, process {process} of {processes}: {gap}");
        }
        // The first process reads all of the validation set, so early stopping sees what one device would see.
        let losses = |folder: &Path| metric(&folder.join("run"), "Loss", 2, Split::Valid);
        let (seen, expected) = (losses(many.path()), losses(one.path()));
        let without = Setup { groups: false, ..setup(words) }.numbers(strategy(words, 1));
        assert_eq!(setup(words).groups, difference(&alone, &without) > 1e-3, "{words}");
        let readers = (layout(words).dp / processes).max(1);
        assert_eq!(seen.len(), validation_batches(readers), "{words}");
        if matches!(words, "TP2" | "PP2,across") {
            assert!(difference(&seen, &expected) < 1e-10);
        }
        // Of the training set those of all ranks.
        let losses = |folder: &Path| metric(&folder.join("run"), "Loss", 2, Split::Train);
        assert!(difference(&losses(many.path()), &losses(one.path())) < 1e-10, "{words}");
    }
}

#[test]
fn processes_write_one_checkpoint_and_resume_from_it() {
    for (layout, processes) in [("DP2 ZeRO1", 2), ("TP2 DP2 ZeRO3", 2), ("PP2 DP2 ZeRO3,across", 4)] {
        let folder = tempfile::tempdir().unwrap();
        let resumed = format!("{layout},resume");
        let words = format!("{layout},checkpoints");
        let half = run(folder.path(), &words, processes);
        assert!(half.iter().any(|(steps, _)| *steps > 0) && half.iter().all(|(_, text)| numbers(text).len() > 1));
        let results = run(folder.path(), &resumed, processes);
        let words = format!("{layout},uninterrupted");
        let whole = setup(&words).numbers(strategy(&words, 1));
        for (_, text) in results {
            let gap = difference(&numbers(&text), &whole);
            assert!(gap < 1e-10, "{layout}: {gap}");
        }
    }
}

#[test]
fn a_process_that_fails_or_dies_ends_all_with_its_message() {
    let folder = tempfile::tempdir().unwrap();
    for (_, text) in run(folder.path(), "DP2 ZeRO1,panic", 2) {
        says!(text, "rank 1 (dp 1) panicked: the model ran into a wall");
    }
    for words in ["TP2 DP2,killed", "PP2,across,killed"] {
        let results = run(folder.path(), words, 2);
        assert!(results[0].1.contains("process 1 on ") && results[0].1.contains("is gone"), "{}", results[0].1);
    }
}

/// Each process of these tests is this test once more.
#[test]
fn processes_that_are_not_to_do_the_same_are_refused() {
    if let (Ok(words), Ok(folder)) = (std::env::var(WORDS), std::env::var(FOLDER)) {
        return one_process(&words, Path::new(&folder));
    }
    for (words, expected) in [
        ("DP2,items", ["has training items 18", "has training items 20"]),
        ("DP2,other", ["process 1", "is not that of the first"]),
        ("PP2,stages", ["layout PP2 over 2 processes", "nearest legal: 1 processes, or .stages().across_processes()"]),
        ("DP3", ["cannot be shared out over 2 processes", "nearest legal"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        for (steps, text) in run(folder.path(), words, 2) {
            assert!(steps == 0 && expected.iter().all(|part| text.contains(part)), "{words}: {text}");
        }
    }
}
