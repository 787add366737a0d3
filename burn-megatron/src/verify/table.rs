//! The table that `verify` prints.

use super::{Candidate, Differences};
use std::fmt;

/// One layout and how far it is from one device.
#[derive(Clone, Debug)]
pub struct Line {
    /// The layout.
    pub candidate: Candidate,
    /// Its differences, or why it did not run to the end.
    pub outcome: Result<Differences, String>,
    /// Share of the choices of experts that were taken from the one device and would have been others.
    pub rerouted: f64,
}

/// The largest share of choices that rounding explains: only tokens with nearly equal experts choose others.
const REROUTED: f64 = 0.1;

impl Line {
    /// The heading over all lines.
    pub fn heading() -> String {
        format!("{:<18} {:>6} {:>10} {:>10} {:>10}   verdict", "layout", "ranks", "loss", "gradients", "parameters")
    }

    /// Whether the layout equals one device.
    pub fn passes(&self) -> bool {
        self.outcome.as_ref().is_ok_and(Differences::pass) && self.rerouted <= REROUTED
    }

    /// Whether the layout did not run to the end.
    pub fn failed(&self) -> bool {
        self.outcome.is_err()
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, ranks) = (self.candidate.to_string(), self.candidate.layout.world_size());
        write!(f, "{name:<18} {ranks:>6}")?;
        let differences = match &self.outcome {
            Ok(differences) => differences,
            Err(why) => {
                let why = why.lines().map(str::trim).collect::<Vec<_>>().join(" ");
                return write!(f, " {:>10} {:>10} {:>10}   FAILED: {why}", "-", "-", "-");
            }
        };
        let Differences { loss, gradients, parameters } = differences;
        for worst in [loss, gradients, parameters] {
            write!(f, " {:>10.1e}", worst.relative)?;
        }
        let worst = differences.worst();
        match differences.pass() {
            true if self.rerouted > REROUTED => {
                let percent = 100.0 * self.rerouted;
                write!(f, "   DIFFERENT: {percent:.0} % of the choices of experts, allowed {:.0} %", 100.0 * REROUTED)
            }
            true => write!(f, "   equal"),
            false => write!(f, "   DIFFERENT: {} ({:.1e}, allowed {:.1e})", worst.at, worst.relative, worst.allowed),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Worst;
    use super::*;

    #[test]
    fn a_line_says_what_differs() {
        let layout = "TP2 SP DP2".parse().unwrap();
        let mut line = Line {
            candidate: Candidate { layout, accumulation: 2, ..Default::default() },
            outcome: Ok(Differences::default()),
            rerouted: 0.0,
        };
        assert!(line.to_string().ends_with("equal"));
        line.rerouted = 0.25;
        let words = "DIFFERENT: 25 % of the choices of experts, allowed 10 %";
        assert!(line.to_string().ends_with(words) && !line.passes(), "{line}");
        line.rerouted = 0.0;
        let gradients = Worst { relative: 0.25, allowed: 1e-10, at: "gradient of w, step 0, rank 1".into() };
        line.outcome = Ok(Differences { gradients, ..Differences::default() });
        let text = line.to_string();
        assert!(text.starts_with("TP2 SP DP2 x2") && text.contains("2.5e-1"), "{text}");
        assert!(text.ends_with("DIFFERENT: gradient of w, step 0, rank 1 (2.5e-1, allowed 1.0e-10)"), "{text}");
        line.outcome = Err("rank 1 (dp 1) panicked: no heads\n  at a.rs:1".into());
        let text = line.to_string();
        assert!(text.ends_with("-   FAILED: rank 1 (dp 1) panicked: no heads at a.rs:1"), "{text}");
        assert!(line.failed() && !line.passes());
    }
}
