//! What is right and what is not: a line for each result, and one at the end.

use std::fmt::Display;
use std::time::Instant;

pub struct Report {
    start: Instant,
    all: usize,
    bad: usize,
    /// The greatest error as a share of its bound, and of what.
    worst: Option<(f64, String)>,
}

impl Default for Report {
    fn default() -> Self {
        Self { start: Instant::now(), all: 0, bad: 0, worst: None }
    }
}

impl Report {
    /// Prints an error and whether it is within its bound. A NaN is not.
    pub fn error(&mut self, what: impl Display, error: f64, bound: f64) {
        self.note(what, error, bound, true);
    }

    /// The same, but prints only an error above its bound.
    pub fn quiet_error(&mut self, what: impl Display, error: f64, bound: f64) {
        self.note(what, error, bound, false);
    }

    fn note(&mut self, what: impl Display, error: f64, bound: f64, always: bool) {
        let (what, share) = (what.to_string(), if error == 0.0 { 0.0 } else { error / bound });
        let is_right = error <= bound;
        if always || !is_right {
            println!("{what:<64} {error:.2e} of {bound:.0e} {}", if is_right { "ok" } else { "BAD" });
        }
        if share > self.worst.as_ref().map_or(0.0, |(worst, _)| *worst) || share.is_nan() {
            self.worst = Some((share, what));
        }
        self.count(is_right);
    }

    /// Prints whether something holds.
    pub fn holds(&mut self, what: impl Display, is_right: bool) {
        println!("{what:<64} {}", if is_right { "ok" } else { "BAD" });
        self.count(is_right);
    }

    /// Prints whether something succeeded, and why not.
    pub fn outcome<T>(&mut self, what: impl Display, outcome: Result<T, impl Display>) {
        match outcome {
            Ok(_) => self.holds(what, true),
            Err(why) => self.holds(format!("{what}: {why}"), false),
        }
    }

    /// What later results need: counts and prints a failure only.
    pub fn attempt<T>(&mut self, what: impl Display, outcome: Result<T, impl Display>) -> Option<T> {
        outcome.map_err(|why| self.holds(format!("{what}: {why}"), false)).ok()
    }

    /// Counts a result that is printed already.
    pub fn count(&mut self, is_right: bool) {
        self.all += 1;
        self.bad += usize::from(!is_right);
    }

    /// Seconds since the begin.
    pub fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64()
    }

    /// Prints the last line; whether nothing is wrong.
    pub fn finish(self, name: &str) -> bool {
        let Self { all, bad, .. } = self;
        let worst = self.worst.as_ref();
        let worst =
            worst.map_or(String::new(), |(share, what)| format!("; the worst is {share:.2} of its bound: {what}"));
        let seconds = self.seconds();
        match (all, bad) {
            (0, _) => println!("{name}: {seconds:.1} s"),
            (_, 0) => println!("{name}: all {all} results are right, {seconds:.1} s{worst}"),
            _ => println!("{name}: {bad} of {all} results are BAD, {seconds:.1} s{worst}"),
        }
        bad == 0
    }
}
