//! How far a layout is from one device.

use super::trace::{LocalTensor, RankTrace, TraceError, assemble};
use backend_dist::shard::HostTensor;
use std::collections::BTreeMap;

/// A gradient that is zero in exact arithmetic (that of a key bias, to which softmax is blind) is nothing but rounding.
/// Differences of a gradient are therefore taken relative to at least this share of the step's largest gradient.
const GRADIENT_FLOOR: f64 = 1e-6;

/// The same for parameters: what such a gradient does to a bias that started at zero is rounding too, made larger by
/// AdamW's division by the root of the second moment.
const PARAMETER_FLOOR: f64 = 1e-4;

/// What one device has seen, as global tensors.
#[derive(Clone, Debug)]
pub struct Reference {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    gradients: Vec<BTreeMap<String, HostTensor>>,
    parameters: BTreeMap<String, HostTensor>,
}

impl Reference {
    /// The trace of a world of one rank.
    ///
    /// # Errors
    /// If the rank does not hold the whole model.
    pub fn new(trace: &RankTrace) -> Result<Self, TraceError> {
        let gradients = trace.gradients.iter().map(assemble).collect::<Result<_, _>>()?;
        Ok(Self {
            losses: trace.losses.clone(),
            grad_norms: trace.grad_norms.clone(),
            gradients,
            parameters: assemble(&trace.parameters)?,
        })
    }
}

/// The worst relative difference of a kind, and where.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Worst {
    /// `max |a − b| / max |b|` over a tensor; over steps, tensors and ranks the largest.
    pub relative: f64,
    /// Global tensor and step, or just the step.
    pub at: String,
}

impl Worst {
    fn take(&mut self, relative: f64, at: impl FnOnce() -> String) {
        if is_worse(relative, self.relative) {
            *self = Self { relative, at: at() };
        }
    }
}

/// Worst relative differences of a layout against one device.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Differences {
    /// Loss and gradient norm over steps.
    pub loss: Worst,
    /// Every gradient of every step.
    pub gradients: Worst,
    /// Every parameter after the last step.
    pub parameters: Worst,
}

impl Differences {
    /// Whether all are at most `tolerance`; a NaN is not.
    pub fn within(&self, tolerance: f64) -> bool {
        [&self.loss, &self.gradients, &self.parameters].iter().all(|worst| worst.relative <= tolerance)
    }

    /// The largest of the three.
    pub fn worst(&self) -> &Worst {
        let mut worst = &self.loss;
        for other in [&self.gradients, &self.parameters] {
            if is_worse(other.relative, worst.relative) {
                worst = other;
            }
        }
        worst
    }
}

/// Compares every slice on every rank, copies and replicas included, with its part of the reference.
pub fn compare(reference: &Reference, ranks: &[RankTrace]) -> Differences {
    let mut found = Differences::default();
    for (rank, trace) in ranks.iter().enumerate() {
        for (step, expected) in reference.losses.iter().enumerate() {
            found.loss.take(relative(trace.losses[step], *expected), || format!("loss of step {step}"));
            let (norm, expected) = (trace.grad_norms[step], reference.grad_norms[step]);
            found.loss.take(relative(norm, expected), || format!("gradient norm of step {step}"));
        }
        for (step, expected) in reference.gradients.iter().enumerate() {
            let place = |name: &str| format!("gradient of {name}, step {step}, rank {rank}");
            tensors(&trace.gradients[step], expected, GRADIENT_FLOOR, &mut found.gradients, place);
        }
        let place = |name: &str| format!("parameter {name}, rank {rank}");
        tensors(&trace.parameters, &reference.parameters, PARAMETER_FLOOR, &mut found.parameters, place);
    }
    found
}

/// Nothing is worse than a NaN.
fn is_worse(new: f64, old: f64) -> bool {
    !old.is_nan() && (new.is_nan() || new > old)
}

/// The largest of some differences, NaN if one of them is.
pub(crate) fn worst_of(differences: impl IntoIterator<Item = f64>) -> f64 {
    differences.into_iter().fold(0.0, |worst, d| if is_worse(d, worst) { d } else { worst })
}

fn relative(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(f64::MIN_POSITIVE)
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |max, value| value.abs().max(max))
}

fn tensors(
    locals: &[LocalTensor],
    globals: &BTreeMap<String, HostTensor>,
    floor: f64,
    worst: &mut Worst,
    place: impl Fn(&str) -> String,
) {
    let floor = floor * globals.values().map(|tensor| largest(&tensor.data)).fold(f64::MIN_POSITIVE, f64::max);
    for local in locals {
        let name = &local.section.name;
        let Some(global) = globals.get(name) else {
            worst.take(f64::INFINITY, || format!("{} which one device does not have", place(name)));
            continue;
        };
        let expected = local.section.slice(&global.data);
        let scale = largest(&global.data).max(floor);
        let gap = worst_of(local.values.iter().zip(&expected).map(|(a, b)| (a - b).abs()));
        worst.take(gap / scale, || place(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend_dist::shard::{Place, Section};

    fn trace_of(value: f64) -> RankTrace {
        let tensor = |name: &str, values: Vec<f64>| {
            let section = Section::replicated(name, &[values.len()], Place { rank: 0, size: 1 });
            LocalTensor { section, values }
        };
        RankTrace {
            losses: vec![2.0],
            grad_norms: vec![1.0],
            gradients: vec![vec![tensor("w", vec![1.0, -4.0]), tensor("k.bias", vec![1e-18])]],
            parameters: vec![tensor("w", vec![value, 8.0])],
        }
    }

    #[test]
    fn differences_are_relative_to_the_largest_element() {
        let reference = Reference::new(&trace_of(1.0)).unwrap();
        let found = compare(&reference, &[trace_of(1.0), trace_of(1.5)]);
        assert_eq!(found.parameters, Worst { relative: 0.0625, at: "parameter w, rank 1".into() });
        assert_eq!((found.gradients.relative, found.loss.relative), (0.0, 0.0));
        assert!(found.within(0.0625) && !found.within(0.06) && found.worst() == &found.parameters);
    }

    #[test]
    fn rounding_around_zero_is_no_difference_but_a_nan_is() {
        let reference = Reference::new(&trace_of(1.0)).unwrap();
        let mut other = trace_of(1.0);
        other.gradients[0][1].values[0] = -2e-18;
        assert!(compare(&reference, &[other.clone()]).within(1e-11));
        other.gradients[0][0].values[0] = f64::NAN;
        other.losses[0] = f64::NAN;
        let found = compare(&reference, &[other]);
        assert!(!found.within(1.0) && found.loss.relative.is_nan() && found.gradients.relative.is_nan());
    }
}
