//! How far a layout is from one device.

use super::bounds::{Bounds, Measure};
use super::trace::{LocalTensor, RankTrace, TraceError, assemble};
use backend_dist::shard::HostTensor;
use std::collections::BTreeMap;

/// A gradient that is zero in exact arithmetic (that of a key bias, to which softmax is blind) is nothing but rounding.
/// Differences of a gradient are therefore taken relative to at least this share of the step's largest gradient.
const GRADIENT_FLOOR: f64 = 1e-6;

/// The same in single precision and below, where such a gradient is a larger share of the others. Root mean squares.
const GRADIENT_NORM_FLOOR: f64 = 1e-3;

/// The same for parameters: what such a gradient does to a bias that started at zero is rounding too, made larger by
/// AdamW's division by the root of the second moment.
const PARAMETER_FLOOR: f64 = 1e-4;

/// The same of root mean squares in single precision and below.
const PARAMETER_NORM_FLOOR: f64 = 1e-3;

/// Global tensors by name.
pub(super) type Tensors = BTreeMap<String, HostTensor>;

/// The losses, gradients and parameters of one device, as global tensors.
#[derive(Clone, Debug)]
pub struct Reference {
    losses: Vec<f64>,
    grad_norms: Vec<f64>,
    gradients: Vec<Tensors>,
    parameters: Tensors,
    initial: Option<Tensors>,
}

impl Reference {
    /// The trace of a world of one rank. Fails if the rank does not hold the whole model.
    pub fn new(trace: &RankTrace) -> Result<Self, TraceError> {
        let gradients = trace.gradients.iter().map(assemble).collect::<Result<_, _>>()?;
        Ok(Self {
            losses: trace.losses.clone(),
            grad_norms: trace.grad_norms.clone(),
            gradients,
            parameters: assemble(&trace.parameters)?,
            initial: None,
        })
    }

    /// With the parameters before the first step, which bounds that depend on the size of the updates need.
    pub fn from_initial(self, initial: Tensors) -> Self {
        Self { initial: Some(initial), ..self }
    }
}

/// The difference of a kind that comes closest to its bound or is furthest beyond it, and where.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Worst {
    /// As the bounds measure it; over steps, tensors and ranks the worst.
    pub relative: f64,
    /// The largest difference that passes there.
    pub allowed: f64,
    /// Global tensor and step, or just the step.
    pub at: String,
}

impl Worst {
    /// The difference relative to the largest one that passes.
    pub fn share(&self) -> f64 {
        if self.relative == 0.0 { 0.0 } else { self.relative / self.allowed }
    }

    /// Takes a difference that is worse, or NaN.
    pub(crate) fn take(&mut self, relative: f64, allowed: f64, at: impl FnOnce() -> String) {
        let new = Self { relative, allowed, at: String::new() };
        if is_worse(new.share(), self.share()) {
            *self = Self { at: at(), ..new };
        }
    }
}

/// Worst differences of a layout against one device.
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
    /// Whether all are within their bounds; a NaN is not.
    pub fn pass(&self) -> bool {
        self.worst().share() <= 1.0
    }

    /// The worst of the three.
    pub fn worst(&self) -> &Worst {
        let mut worst = &self.loss;
        for other in [&self.gradients, &self.parameters] {
            if is_worse(other.share(), worst.share()) {
                worst = other;
            }
        }
        worst
    }
}

/// Compares every slice on every rank, copies and data-parallel ranks included, with its part of the reference.
pub fn compare(reference: &Reference, ranks: &[RankTrace], bounds: &Bounds) -> Differences {
    let mut found = Differences::default();
    let [gradient_floor, parameter_floor] = match bounds.measure {
        Measure::Largest => [GRADIENT_FLOOR, PARAMETER_FLOOR],
        Measure::Norm => [GRADIENT_NORM_FLOOR, PARAMETER_NORM_FLOOR],
    };
    for (rank, trace) in ranks.iter().enumerate() {
        for (step, expected) in reference.losses.iter().enumerate() {
            found.loss.take(relative(trace.losses[step], *expected), bounds.loss, || format!("loss of step {step}"));
            let (norm, expected) = (trace.grad_norms[step], reference.grad_norms[step]);
            found.loss.take(relative(norm, expected), bounds.loss, || format!("gradient norm of step {step}"));
        }
        for (step, expected) in reference.gradients.iter().enumerate() {
            let sizes = Sizes::new(bounds.measure, expected, gradient_floor);
            let place = |name: &str| format!("gradient of {name}, step {step}, rank {rank}");
            tensors(&trace.gradients[step], expected, &sizes, &mut found.gradients, place, |local, _| {
                bounds.gradient(local.unit)
            });
        }
        let sizes = Sizes::new(bounds.measure, &reference.parameters, parameter_floor);
        let place = |name: &str| format!("parameter {name}, rank {rank}");
        tensors(&trace.parameters, &reference.parameters, &sizes, &mut found.parameters, place, |local, after| {
            let before = reference.initial.as_ref().map(|initial| &initial[&local.section.name].data);
            let update = before.map_or(0.0, |before| sizes.relative(before, after, after));
            bounds.parameter(local.unit, update)
        });
    }
    found
}

/// How large differences and tensors are.
struct Sizes {
    measure: Measure,
    /// Tensors count as at least this large.
    floor: f64,
}

impl Sizes {
    /// `floor` relative to the largest of `tensors`.
    fn new(measure: Measure, tensors: &Tensors, floor: f64) -> Self {
        let sizes = Self { measure, floor: 0.0 };
        let largest = tensors.values().map(|tensor| sizes.of(tensor.data.iter().copied())).fold(0.0, f64::max);
        Self { measure, floor: floor * largest.max(f64::MIN_POSITIVE) }
    }

    /// The largest element, or the root of the mean square; NaN if an element is.
    fn of(&self, values: impl ExactSizeIterator<Item = f64>) -> f64 {
        let count = values.len().max(1) as f64;
        match self.measure {
            Measure::Largest => worst_of(values.map(f64::abs)),
            Measure::Norm => (values.map(|x| x * x).sum::<f64>() / count).sqrt(),
        }
    }

    /// `a − b` relative to the larger one of `b` and the tensor that it is a slice of.
    fn relative(&self, a: &[f64], b: &[f64], whole: &[f64]) -> f64 {
        let scale = self.of(whole.iter().copied()).max(self.of(b.iter().copied())).max(self.floor);
        self.of(a.iter().zip(b).map(|(a, b)| a - b)) / scale
    }
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

fn tensors(
    locals: &[LocalTensor],
    globals: &Tensors,
    sizes: &Sizes,
    worst: &mut Worst,
    place: impl Fn(&str) -> String,
    allowed: impl Fn(&LocalTensor, &[f64]) -> f64,
) {
    for local in locals {
        let name = &local.section.name;
        let Some(global) = globals.get(name) else {
            worst.take(f64::INFINITY, 1.0, || format!("{} which one device does not have", place(name)));
            continue;
        };
        let expected = local.section.slice(&global.data);
        let gap = sizes.relative(&local.values, &expected, &global.data);
        worst.take(gap, allowed(local, &global.data), || place(name));
    }
}

#[cfg(test)]
mod tests {
    use super::super::bounds::TOLERANCE;
    use super::*;
    use backend_dist::shard::{GroupPosition, Section, Unit};
    use burn::tensor::FloatDType;

    fn trace_of(value: f64) -> RankTrace {
        let tensor = |name: &str, values: Vec<f64>| {
            let section = Section::replicated(name, &[values.len()], GroupPosition { rank: 0, size: 1 });
            LocalTensor { section, unit: Unit::Layer(0), values }
        };
        RankTrace {
            losses: vec![2.0],
            grad_norms: vec![1.0],
            gradients: vec![vec![tensor("w", vec![1.0, -4.0]), tensor("k.bias", vec![1e-18])]],
            parameters: vec![tensor("w", vec![value, 8.0])],
        }
    }

    fn within(tolerance: f64) -> Bounds {
        Bounds::new(FloatDType::F64, Some(tolerance), 1)
    }

    #[test]
    fn differences_are_relative_to_the_largest_element() {
        let reference = Reference::new(&trace_of(1.0)).unwrap();
        let find = |bounds| compare(&reference, &[trace_of(1.0), trace_of(1.5)], &bounds);
        let found = find(within(0.0625));
        assert_eq!(found.parameters, Worst { relative: 0.0625, allowed: 0.0625, at: "parameter w, rank 1".into() });
        assert_eq!((found.gradients.relative, found.loss.relative), (0.0, 0.0));
        assert!(found.pass() && found.worst() == &found.parameters && !find(within(0.06)).pass());
    }

    #[test]
    fn rounding_around_zero_is_no_difference_but_a_nan_is() {
        let reference = Reference::new(&trace_of(1.0)).unwrap();
        let mut other = trace_of(1.0);
        other.gradients[0][1].values[0] = -2e-18;
        assert!(compare(&reference, &[other.clone()], &within(1e-11)).pass());
        other.gradients[0][0].values[0] = f64::NAN;
        other.losses[0] = f64::NAN;
        let found = compare(&reference, &[other], &within(1.0));
        assert!(!found.pass() && found.loss.relative.is_nan() && found.gradients.relative.is_nan());
    }

    /// Norms: the difference (0, 0.05) of the gradient (1, -4), whatever the largest element is.
    #[test]
    fn bf16_is_measured_in_norms_and_parameters_by_their_update() {
        let initial = assemble(&trace_of(0.0).parameters).unwrap();
        let reference = Reference::new(&trace_of(1.0)).unwrap().from_initial(initial);
        let mut other = trace_of(1.0);
        other.gradients[0][0].values[1] -= 0.05;
        let bounds = Bounds::new(FloatDType::BF16, None, 1);
        let found = compare(&reference, &[other], &bounds);
        assert!((found.gradients.relative - 0.05 / 17f64.sqrt()).abs() < 1e-15, "{found:?}");
        assert!(found.pass() && found.gradients.allowed == bounds.gradient(Unit::Layer(0)));
        // The update (1, 0) of the parameters (1, 8): half of it missing is too much, rounding is not.
        let update = 1.0 / 65f64.sqrt();
        let found = compare(&reference, &[trace_of(0.5)], &bounds);
        assert!((found.parameters.allowed - bounds.parameter(Unit::Layer(0), update)).abs() < 1e-15 && !found.pass());
        assert!(compare(&reference, &[trace_of(1.0 + 1.0 / 256.0)], &bounds).pass());
        assert!(!compare(&reference, &[trace_of(1.001)], &within(TOLERANCE)).pass());
    }
}
