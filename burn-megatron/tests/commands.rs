//! `verify` and `replay` from the command line: what they print, and the exit code.

use std::process::{Command, Output};

fn run(arguments: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_burn-megatron")).args(arguments.split(' ')).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn recorded(name: &str) -> String {
    format!("{}/../tests/golden/megatron/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn verify_prints_a_row_per_layout_and_fails_past_the_tolerance() {
    let layouts = "verify --steps 1 --model gpt --layout TP2 --layout DP2";
    let output = run(layouts);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    assert_eq!(table.lines().filter(|line| line.ends_with("  equal")).count(), 2, "{table}");

    let output = run(&format!("{layouts} --tolerance 1e-30"));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("DIFFERENT: "), "{}", text(&output.stdout));
}

#[test]
fn verify_names_what_does_not_fit() {
    for (arguments, words) in [
        ("--layout TP3", "nearest legal: 2, 4"),
        ("--layout PP2", "pipeline-parallel 2 does not run yet"),
        ("--layout XY2", "XY2"),
        ("--layout DP3", "--global-batch 8"),
        ("--steps 0", "nothing to verify"),
    ] {
        let output = run(&format!("verify {arguments}"));
        assert!(!output.status.success(), "{arguments}");
        assert!(text(&output.stderr).contains(words), "{arguments}: {}", text(&output.stderr));
    }
}

#[test]
fn replay_prints_every_step_beside_megatrons() {
    let output = run(&format!("replay {} --tensor-model-parallel-size 2 --sequence-parallel", recorded("tied")));
    let table = text(&output.stdout);
    assert!(output.status.success(), "{table}{}", text(&output.stderr));
    assert!(table.contains("in TP2 SP, F64") && table.contains("4.912880"), "{table}");
    assert!(table.trim_end().ends_with("equal"), "{table}");

    let output = run("replay no/such/folder");
    assert!(!output.status.success() && text(&output.stderr).contains("no/such/folder/metrics.json"));
}
