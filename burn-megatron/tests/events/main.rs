//! Runs to which things happen: they are stopped, go back to an older checkpoint, go on in other layouts with other
//! micro-batches, are extended, are watched more or less often. Whatever happens, they learn what the run learns that one
//! device does in one go.

mod case;
mod draw;
mod failures;
mod run;

use case::Case;
use draw::Draw;

/// As many random runs as fit, `EVENTS_SEED` (1) the first of them: `EVENTS_SECONDS` for longer ones than the few that belong
/// to the tests.
#[test]
fn random_events_change_nothing() {
    let number =
        |name: &str, default: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (first, seconds) = (number("EVENTS_SEED", 1), number("EVENTS_SECONDS", 0));
    let start = std::time::Instant::now();
    let mut wrong = Vec::new();
    let mut seed = first;
    while seed < first + 6 || start.elapsed().as_secs() < seconds {
        let case = Case::draw(&mut Draw::new(seed));
        if let Err(what) = case.check() {
            eprintln!("seed {seed}: {what}\n  {case}");
            wrong.push(seed);
        }
        seed += 1;
    }
    assert!(wrong.is_empty(), "{} of {} runs differ, seeds {wrong:?}", wrong.len(), seed - first);
}

/// The same in the precisions that training uses, where the layout stays: not a bit may differ.
#[test]
fn stopping_changes_no_bit_in_any_precision() {
    let number =
        |name: &str, default: u64| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let (first, seconds) = (number("EVENTS_SEED", 1), number("EVENTS_SECONDS", 0));
    let start = std::time::Instant::now();
    let mut wrong = Vec::new();
    let mut seed = first;
    while seed < first + 4 || start.elapsed().as_secs() < seconds {
        let case = Case::draw_narrow(&mut Draw::new(seed));
        if let Err(what) = case.check() {
            eprintln!("seed {seed}: {what}\n  {case}");
            wrong.push(seed);
        }
        seed += 1;
    }
    assert!(wrong.is_empty(), "{} of {} runs differ, seeds {wrong:?}", wrong.len(), seed - first);
}
