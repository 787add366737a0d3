//! Runs with events: they are stopped, go back to an older checkpoint, resume in other layouts with other micro-batches,
//! are extended, are evaluated more or less often. All of them learn what an uninterrupted run on one device learns.

mod case;
mod config;
mod draw;
mod failures;
mod run;

use std::time::{Duration, Instant};

use case::Case;
use draw::Draw;

/// Checks `count` random runs, or as many as fit into `EVENTS_SECONDS`; the first is that of `EVENTS_SEED` (1).
fn check(count: u64, case: fn(&mut Draw) -> Case) {
    let number = |name| std::env::var(name).ok().and_then(|text: String| text.parse().ok());
    let (first, seconds) = (number("EVENTS_SEED").unwrap_or(1), number("EVENTS_SECONDS").unwrap_or(0));
    let (start, mut wrong, mut seed) = (Instant::now(), Vec::new(), first);
    while seed < first + count || start.elapsed() < Duration::from_secs(seconds) {
        let case = case(&mut Draw::new(seed));
        if let Err(what) = case.check() {
            eprintln!("seed {seed}: {what}\n  {case}");
            wrong.push(seed);
        }
        seed += 1;
    }
    eprintln!("{} runs, {} of them wrong", seed - first, wrong.len());
    assert!(wrong.is_empty(), "the runs of seeds {wrong:?} differ");
}

#[test]
fn whatever_happens_in_whatever_layouts_is_learned_as_on_one_device() {
    check(6, Case::draw);
}

/// In the precisions that training uses the layout stays: not a bit may differ.
#[test]
fn stopping_changes_no_bit_in_any_precision() {
    check(4, Case::draw_narrow);
}
