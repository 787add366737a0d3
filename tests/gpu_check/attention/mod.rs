//! The attention kernels for Hopper against an fp64 reference on small shapes, and their times on a training shape.
//!
//! An error is ‖x − ref‖ / ‖ref‖; its bound is 1.2 times the error of the textbook computation in bf16 or fp16 with fp32
//! sums, and `ratio` is the kernels' error over that one. `sweep` also times other plans.

mod bench;
pub mod case;
mod check;

use crate::choice::Choice;
use crate::kernel_tests::client;
use crate::numbers::most;
use crate::report::Report;
use backend_dist::launch::BoxError;
use cubecl::prelude::Client;
use std::collections::BTreeMap;

/// Checks a case; the greatest ratios of `out`, `dq`, `dk` and `dv`.
type Checked = fn(&Client, &case::Case, &mut Report) -> [f64; 4];

pub fn run(choice: &Choice, report: &mut Report) -> Result<(), BoxError> {
    let client = client();
    let mut ratios: BTreeMap<&str, [f64; 4]> = BTreeMap::new();
    if choice.does("check") {
        let checks: [(_, Checked); 2] = [(case::cases(), check::check), (case::rings(), check::ring)];
        for (cases, check) in checks {
            for case in cases.iter().filter(|case| choice.wants(case.name)) {
                let worst = ratios.entry(case.name).or_default();
                let found = worst.iter_mut().zip(check(&client, case, report));
                found.for_each(|(worst, new)| *worst = most([*worst, new]));
            }
        }
        println!("checked in {:.1} s", report.seconds());
    }
    let mut speeds: BTreeMap<&str, [f64; 2]> = BTreeMap::new();
    if choice.does("time") || choice.names("sweep") {
        for case in case::timed().iter().filter(|case| choice.wants(case.name)) {
            let [forward, backward] = bench::bench(&client, case, choice.names("sweep"));
            println!("{:<18} {forward:7.1} {backward:9.1} TFLOP/s after {:.1} s", case.name, report.seconds());
            speeds.insert(case.name, [forward, backward]);
        }
    }
    println!("\nvariant            forward  backward  out   dq    dk    dv   (TFLOP/s; greatest error ratios)");
    for name in case::names() {
        let (speed, errors) = (speeds.get(name.as_str()), ratios.get(name.as_str()));
        if speed.is_some() || errors.is_some() {
            let speed = speed.map_or("      -         -".into(), |[f, b]| format!("{f:7.1} {b:9.1}"));
            let errors = errors.map(|r| r.map(|r| format!("{r:.2}")).join("  ")).unwrap_or_default();
            println!("{name:<18} {speed}  {errors}");
        }
    }
    Ok(())
}
