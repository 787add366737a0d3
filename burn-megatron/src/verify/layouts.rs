//! Which layouts to try. Pure.

use backend_dist::mesh::{LayoutError, ParallelLayout};
use std::fmt;
use std::str::FromStr;

/// A layout and how often a rank accumulates per step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Sizes of the parallel axes.
    pub layout: ParallelLayout,
    /// Micro-batches per rank and step.
    pub accumulation: usize,
}

impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layout)?;
        if self.accumulation > 1 {
            write!(f, " x{}", self.accumulation)?;
        }
        Ok(())
    }
}

/// As it is shown: `TP2 SP DP2 x2` is two micro-batches in that layout.
impl FromStr for Candidate {
    type Err = LayoutError;

    fn from_str(text: &str) -> Result<Self, LayoutError> {
        let (rest, last) = text.trim().rsplit_once(' ').unwrap_or(("", text.trim()));
        match last.strip_prefix('x').and_then(|count| count.parse().ok()).filter(|count| *count > 0) {
            Some(accumulation) if rest.is_empty() => Ok(Self { layout: ParallelLayout::default(), accumulation }),
            Some(accumulation) => Ok(Self { layout: rest.parse()?, accumulation }),
            None => Ok(Self { layout: text.parse()?, accumulation: 1 }),
        }
    }
}

/// All combinations of tensor, sequence and data parallelism on up to `ranks` ranks, each with 1 and 2 micro-batches
/// per step, that `allowed` accepts and whose micro-batches divide `global_batch`. The reference, one device and one
/// micro-batch, is not among them.
pub fn candidates(ranks: usize, global_batch: usize, allowed: impl Fn(&ParallelLayout) -> bool) -> Vec<Candidate> {
    let mut list = Vec::new();
    for tp in 1..=ranks {
        for sp in [false, true] {
            for dp in 1..=ranks / tp {
                let layout = ParallelLayout { tp, sp, dp, ..Default::default() };
                if (sp && tp == 1) || !allowed(&layout) {
                    continue;
                }
                for accumulation in [1, 2] {
                    let reference = tp * dp * accumulation == 1;
                    if !reference && global_batch.is_multiple_of(dp * accumulation) {
                        list.push(Candidate { layout: layout.clone(), accumulation });
                    }
                }
            }
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_shown() {
        for text in ["TP2 SP DP2 x2", "TP1 x2", "DP4", "TP4 SP"] {
            assert_eq!(text.parse::<Candidate>().unwrap().to_string(), text);
        }
        assert_eq!("x3".parse::<Candidate>().unwrap().accumulation, 3);
        assert!("TP2 x0".parse::<Candidate>().is_err() && "TP2 y2".parse::<Candidate>().is_err());
    }

    #[test]
    fn every_combination_that_fits() {
        let names: Vec<String> = candidates(4, 8, |layout| layout.tp != 3).iter().map(ToString::to_string).collect();
        assert_eq!(
            names,
            [
                "TP1 x2",
                "DP2",
                "DP2 x2",
                "DP4",
                "DP4 x2",
                "TP2",
                "TP2 x2",
                "TP2 DP2",
                "TP2 DP2 x2",
                "TP2 SP",
                "TP2 SP x2",
                "TP2 SP DP2",
                "TP2 SP DP2 x2",
                "TP4",
                "TP4 x2",
                "TP4 SP",
                "TP4 SP x2"
            ]
        );
    }
}
