//! Checks the attention kernels against an fp64 reference on small shapes and times them on a training shape.
//!
//! `cargo run --release --example attention_check --features cuda` on a machine with a Hopper GPU. Arguments: words
//! that select cases by name. `check` or `time` alone does only that, `sweep` also times other plans. An error is ‖x −
//! ref‖ / ‖ref‖; `16 bits` is the error of the textbook computation in bf16 or fp16 with fp32 sums, `ratio` the
//! kernels' error over that.
use cubecl_runtime::runtime::Runtime;
use std::collections::BTreeMap;
use std::time::Instant;

mod bench;
mod case;
mod check;
#[path = "../../tests/draws/mod.rs"]
mod draws;
mod reference;

use check::Verdict;

fn main() {
    let (modes, words): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|word| ["check", "time", "sweep"].contains(&word.as_str()));
    let has = |mode: &str| modes.iter().any(|m| m == mode);
    let wanted = |case: &case::Case| words.is_empty() || words.iter().any(|word| case.name.contains(word.as_str()));
    let client = cubecl::cuda::CudaRuntime::client(&Default::default());
    let start = Instant::now();

    let mut failures = 0;
    let mut ratios: BTreeMap<&str, [f64; 4]> = BTreeMap::new();
    let mut note = |name, verdict: Verdict| {
        failures += verdict.failures;
        let worst = ratios.entry(name).or_default();
        // A NaN stays.
        worst.iter_mut().zip(verdict.ratios).for_each(|(worst, new)| *worst = if new <= *worst { *worst } else { new });
    };
    if !has("time") {
        for case in case::cases().iter().filter(|case| wanted(case)) {
            note(case.name, check::check(&client, case));
        }
        for case in case::rings().iter().filter(|case| wanted(case)) {
            note(case.name, check::check_ring(&client, case));
        }
        println!("checked in {:.1} s", start.elapsed().as_secs_f64());
    }
    let mut speeds: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    if !has("check") {
        for case in case::timed().iter().filter(|case| wanted(case)) {
            let [forward, backward] = bench::bench(&client, case, has("sweep"));
            println!(
                "{:<18} {forward:7.1} {backward:9.1} TFLOP/s after {:.1} s",
                case.name,
                start.elapsed().as_secs_f64()
            );
            speeds.insert(case.name, [forward, backward]);
        }
    }
    println!("\nvariant            forward  backward  out   dq    dk    dv   (TFLOP/s; greatest error ratios)");
    let mut names: Vec<&str> = ratios.keys().chain(speeds.keys()).copied().collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let speed = speeds.get(name).map_or("      -         -".into(), |[f, b]| format!("{f:7.1} {b:9.1}"));
        let errors = ratios.get(name).map(|r| r.map(|r| format!("{r:.2}")).join("  ")).unwrap_or_default();
        println!("{name:<18} {speed}  {errors}");
    }
    println!("{failures} failures, {:.1} s", start.elapsed().as_secs_f64());
    assert_eq!(failures, 0, "results further from the reference than their bounds");
}
