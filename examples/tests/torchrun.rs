//! Examples run under torchrun as alone: with the variables that it sets, two processes print and learn what one does.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

const STEPS: usize = 2;

/// The built example, which cargo builds before the tests of this package.
fn example(folder: &Path, out: &str, process: Option<(usize, u16)>) -> Child {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().unwrap().parent().unwrap().join("examples/llama3_8b");
    let mut command = Command::new(program);
    let sizes = ["--gpus", "0", "--seq-length", "16", "--micro-batch", "1", "--global-batch", "4"];
    command.current_dir(folder).args(sizes).args(["--data", "book.txt", "--out", out, "--steps", &STEPS.to_string()]);
    if let Some((process, port)) = process {
        command.env("RANK", process.to_string()).env("LOCAL_RANK", process.to_string());
        command.env("WORLD_SIZE", "2").env("LOCAL_WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn succeed(child: Child) -> String {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let [stdout, stderr] = [stdout, stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(status.success(), "{stdout}{stderr}");
    stdout
}

/// The losses of all steps, as they were written.
fn losses(folder: &Path, out: &str) -> Vec<String> {
    let log = fs::read_to_string(folder.join(out).join("steps.jsonl")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter(|line| line["kind"] == "train").map(|line| line["loss"].to_string()).collect()
}

#[test]
fn an_example_in_two_processes_learns_what_it_learns_in_one() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text: String = (0..400).map(|i| format!("Line {i} says that {i} times {i} is {}.\n\n", i * i)).collect();
    fs::write(folder.join("book.txt"), text).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let processes = [0, 1].map(|process| example(folder, "two", Some((process, port))));
    let [first, second] = processes.map(succeed);
    assert!(first.contains("written to two") && second.is_empty(), "the first process speaks: {second}");
    succeed(example(folder, "alone", None));
    assert_eq!((losses(folder, "two").len(), losses(folder, "two")), (STEPS, losses(folder, "alone")));
}
