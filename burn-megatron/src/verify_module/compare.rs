//! How far the ranks' numbers are from those of one device.

use crate::learner::{ModuleTrace, Named};
use crate::verify::{Differences, Worst};

/// A gradient that is zero in exact arithmetic is nothing but rounding: differences are relative to at least this share
/// of the largest norm among the tensors of the step. A bias that a loss of differences cancels is a sum of terms that may be as
/// large as that norm, so that 1e-10 of this share must be well above the 2e-16 to which `f64` rounds them.
const FLOOR: f64 = 1e-3;

/// The worst differences of `ranks` from the `one` device. The loss of a step is the mean over the ranks; a gradient or
/// parameter is compared on each rank that has it, and a gradient that no rank has counts as infinitely wrong. Those up to
/// `bound` pass.
pub(super) fn compare(one: &ModuleTrace, ranks: &[ModuleTrace], bound: f64) -> Differences {
    let mut found = Differences::default();
    for (step, expected) in one.losses.iter().enumerate() {
        let mean = ranks.iter().map(|rank| rank.losses[step]).sum::<f64>() / ranks.len() as f64;
        let gap = (mean - expected).abs() / expected.abs().max(f64::MIN_POSITIVE);
        found.loss.take(gap, bound, || format!("loss of step {step}"));
    }
    for (step, expected) in one.gradients.iter().enumerate() {
        let here: Vec<&Named> = ranks.iter().map(|rank| &rank.gradients[step]).collect();
        tensors((expected, &here), bound, &mut found.gradients, |path| format!("gradient of {path}, step {step}"));
    }
    let here: Vec<&Named> = ranks.iter().map(|rank| &rank.parameters).collect();
    tensors((&one.parameters, &here), bound, &mut found.parameters, |path| format!("parameter {path}"));
    found
}

fn tensors((expected, ranks): (&Named, &[&Named]), bound: f64, worst: &mut Worst, name: impl Fn(&str) -> String) {
    let largest = expected.values().map(|values| norm(values)).fold(f64::MIN_POSITIVE, f64::max);
    for (rank, tensors) in ranks.iter().enumerate() {
        for (path, values) in tensors.iter() {
            let at = || format!("{}, rank {rank}", name(path));
            let gap = expected.get(path).filter(|expected| expected.len() == values.len()).map(|expected| {
                let difference: Vec<f64> = values.iter().zip(expected).map(|(here, one)| here - one).collect();
                norm(&difference) / norm(expected).max(FLOOR * largest)
            });
            worst.take(gap.unwrap_or(f64::INFINITY), bound, at);
        }
    }
    for path in expected.keys().filter(|path| !ranks.iter().any(|tensors| tensors.contains_key(*path))) {
        worst.take(f64::INFINITY, bound, || format!("{}, which no rank has", name(path)));
    }
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}
