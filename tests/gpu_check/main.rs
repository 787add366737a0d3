//! Checks and times on GPUs what `cargo test` cannot run: kernels against fp64 and next to the copy bandwidth,
//! collectives and layers over several GPUs against CPU ranks.
//!
//! `cargo run --release --bin gpu_check --features cuda -- NAME [NUMBER..] [WORD..]`. `--list` shows the names with their
//! numbers and words, and after a name the cases that a word chooses if it is a part of theirs. Without a word all of a
//! check runs, without a name every check. Exits 1 if a result is wrong, 2 without the GPUs.

#![allow(clippy::single_range_in_vec_init, reason = "slices are made of them, as in the workspace's lints")]

mod attention;
mod choice;
mod clock;
mod collectives;
mod comm;
mod encoder;
mod fp8;
mod fully_shard;
mod grouped;
mod host_copies;
mod kernel_tests;
mod logical;
mod logical_overhead;
mod masked_attention;
mod moe;
mod numbers;
mod pointwise;
mod portable;
mod ranks;
mod report;

use backend_dist::gpu;
use choice::{Check, Choice};
use report::Report;
use std::process::ExitCode;

const BOTH: &[&str] = &["check", "time"];

/// The encoder's size and a GPU's batch; by default 302 million parameters and 16 × 512 tokens, in f32.
const ENCODER: &[(&str, usize)] = &[("GPUS", 2), ("WIDTH", 1024), ("LAYERS", 24), ("BATCH", 16)];

static CHECKS: [Check; 13] = [
    Check {
        parts: &["check", "time", "sweep"],
        cases: attention::case::names,
        ..Check::new(
            "attention",
            attention::run,
            "Hopper's kernels against fp64; TFLOP/s; `sweep` times other plans too",
        )
    },
    Check {
        parts: BOTH,
        ..Check::new(
            "masked-attention",
            masked_attention::run,
            "attention with masks for single scores and dropout against f64; ms",
        )
    },
    Check {
        parts: BOTH,
        ..Check::new("portable", portable::run, "attention without Hopper's instructions against fp64")
    },
    Check {
        parts: BOTH,
        cases: pointwise::names,
        ..Check::new(
            "pointwise",
            pointwise::run,
            "kernels bound by memory against fp64; TB/s; `plans` times other plans too",
        )
    },
    Check { parts: BOTH, ..Check::new("fp8", fp8::run, "FP8 casts against the host's bits; TB/s") },
    Check {
        parts: &["check", "time", "fp8"],
        cases: grouped::time::names,
        ..Check::new("grouped", grouped::run, "grouped GEMMs against fp64; TFLOP/s; `fp8` does both in FP8")
    },
    Check {
        numbers: &[("GPUS", 2)],
        parts: &collectives::NAMES,
        ..Check::new("collectives", collectives::run, "NCCL and kernels against CPU ranks; overlap, failures; times")
    },
    Check {
        numbers: &[("GPUS", 1), ("GB", 4)],
        ..Check::new("host-copies", host_copies::run, "copies to page-locked memory while the GPU continues; GB/s")
    },
    Check {
        numbers: &[("GPUS", 1)],
        parts: &["layers", "routing", "times"],
        ..Check::new("moe", moe::run, "experts over GPUs against a CPU rank; routing by GPUs against the host; times")
    },
    Check {
        numbers: ENCODER,
        parts: BOTH,
        ..Check::new(
            "logical",
            logical::run,
            "logical devices: an encoder in tensor parallel against one GPU; tokens/s",
        )
    },
    Check {
        numbers: ENCODER,
        parts: BOTH,
        ..Check::new("fully-shard", fully_shard::run, "an encoder in ZeRO 3 against one GPU; tokens/s and memory")
    },
    Check { numbers: &[("RANKS", 2)], ..Check::new("comm", comm::run, "times of collectives between CPU ranks") },
    Check {
        numbers: &[("LAYERS", 12), ("STEPS", 20)],
        ..Check::new("logical-overhead", logical_overhead::run, "what an operation of a logical device costs the host")
    },
];

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let is_list = words.iter().any(|word| word == "--list");
    words.retain(|word| word != "--list");
    let chosen: Result<Vec<(&Check, Choice)>, String> = match words.split_first() {
        None => CHECKS.iter().map(|check| Ok((check, check.choose(&[])?))).collect(),
        Some((name, rest)) => choice::find(&CHECKS, name).and_then(|check| Ok(vec![(check, check.choose(rest)?)])),
    };
    let chosen = match chosen {
        Ok(chosen) => chosen,
        Err(unknown) => {
            eprintln!("{unknown}");
            return ExitCode::FAILURE;
        }
    };
    if is_list {
        chosen.iter().for_each(|(check, _)| check.list(!words.is_empty()));
        return ExitCode::SUCCESS;
    }
    let gpus = chosen.iter().map(|(check, choice)| check.gpus(choice)).max().unwrap_or(0);
    if let Some(missing) = (gpus > 0).then(|| gpu::require(gpus).err()).flatten() {
        eprintln!("{missing}");
        return ExitCode::from(2);
    }
    let mut code = ExitCode::SUCCESS;
    for (check, choice) in &chosen {
        let mut report = Report::default();
        let outcome = (check.run)(choice, &mut report);
        report.attempt(check.name, outcome);
        if !report.finish(check.name) {
            code = ExitCode::FAILURE;
        }
    }
    code
}
