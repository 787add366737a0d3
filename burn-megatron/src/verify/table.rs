//! The table that `verify` prints.

use super::{Candidate, Differences};
use std::fmt;

/// One layout and how far it is from one device.
#[derive(Clone, Debug)]
pub struct Row {
    /// The layout.
    pub candidate: Candidate,
    /// Its differences.
    pub differences: Differences,
    /// Share of the choices of experts that were taken from the one device and would have been others.
    pub rerouted: f64,
}

/// The largest share of choices that rounding explains: only tokens with nearly equal experts choose others.
const REROUTED: f64 = 0.1;

impl Row {
    /// The heading over rows.
    pub fn heading() -> String {
        format!("{:<18} {:>6} {:>10} {:>10} {:>10}   verdict", "layout", "ranks", "loss", "gradients", "parameters")
    }

    /// Whether the layout equals one device.
    pub fn passes(&self) -> bool {
        self.differences.pass() && self.rerouted <= REROUTED
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Differences { loss, gradients, parameters } = &self.differences;
        let (name, ranks) = (self.candidate.to_string(), self.candidate.layout.world_size());
        write!(f, "{name:<18} {ranks:>6}")?;
        for worst in [loss, gradients, parameters] {
            write!(f, " {:>10.1e}", worst.relative)?;
        }
        let worst = self.differences.worst();
        match self.differences.pass() {
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
    fn a_row_says_what_differs() {
        let layout = "TP2 SP DP2".parse().unwrap();
        let mut row = Row {
            candidate: Candidate { layout, accumulation: 2, ..Default::default() },
            differences: Differences::default(),
            rerouted: 0.0,
        };
        assert!(row.to_string().ends_with("equal"));
        row.rerouted = 0.25;
        let words = "DIFFERENT: 25 % of the choices of experts, allowed 10 %";
        assert!(row.to_string().ends_with(words) && !row.passes(), "{row}");
        row.rerouted = 0.0;
        row.differences.gradients =
            Worst { relative: 0.25, allowed: 1e-10, at: "gradient of w, step 0, rank 1".into() };
        let text = row.to_string();
        assert!(text.starts_with("TP2 SP DP2 x2") && text.contains("2.5e-1"), "{text}");
        assert!(text.ends_with("DIFFERENT: gradient of w, step 0, rank 1 (2.5e-1, allowed 1.0e-10)"), "{text}");
    }
}
