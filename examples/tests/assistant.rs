//! The example of post-training: what each of its models answers.

use std::io::Write;
use std::process::{Command, Stdio};

#[test]
fn each_model_answers_as_it_was_taught() {
    let folder = tempfile::tempdir().unwrap();
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().unwrap().parent().unwrap().join("examples/assistant");
    let mut child = Command::new(program)
        .current_dir(&folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"2+3\n9+9\n/adapter none\n/reset\n2+3\n").unwrap();
    let output = child.wait_with_output().unwrap();
    let [said, errors] = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
    assert!(output.status.success(), "{said}{errors}");
    // Either answer is right; alone the sum is what LoRA, and never what DPO and the model that learned from it say.
    let shares = |task: &str| -> Vec<f64> {
        let lines = said.lines().filter(|line| line.starts_with(task) && line.contains("exact_match"));
        lines.map(|line| line.split_whitespace().nth(4).unwrap().parse().unwrap()).collect()
    };
    assert!(shares("either").iter().all(|right| *right > 0.9) && shares("either").len() == 4, "{said}");
    let [mixed, curt, wordy, small] = shares("sum")[..] else { panic!("{said}") };
    assert!((0.1..0.9).contains(&mixed) && curt > 0.9 && wordy < 0.1 && small < 0.1, "{said}");
    let answers: Vec<&str> = said.lines().rev().take(3).collect();
    assert!(["5", "2+3=5"].contains(&answers[0]) && answers[1..] == ["18", "5"], "{said}");
}
