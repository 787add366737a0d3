//! `burn-megatron`, as a user types it.
#![allow(dead_code, reason = "no test program needs all of it")]

use std::path::Path;
use std::process::{Command, Output};

pub fn run(folder: &Path, arguments: &str) -> Output {
    let arguments = arguments.split_whitespace();
    Command::new(env!("CARGO_BIN_EXE_burn-megatron")).current_dir(folder).args(arguments).output().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What a command says that must not fail.
pub fn succeed(folder: &Path, arguments: &str) -> String {
    let output = run(folder, arguments);
    assert!(output.status.success(), "{arguments}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// What a command says that must fail.
pub fn fail(folder: &Path, arguments: &str) -> String {
    let output = run(folder, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments}: {}", text(&output.stdout));
    text(&output.stderr)
}
