//! One step over the parts of a bucket, one by one.

use super::super::flat::Flat;
use super::super::layout::{Layout, Part};
use super::super::rule::Rule;
use super::super::states::place;
use backend_dist::gpu::buffer::muon_step;
use burn::tensor::Tensor;

/// Steps of matrices that Muon has orthogonalised: what to subtract so many times, and the share of the matrix to keep;
/// by part.
#[derive(Default)]
pub struct MatrixSteps {
    pub steps: Vec<Option<(Tensor<1>, f64)>>,
    pub keep: f64,
}

/// Everything that one step needs of a bucket.
pub(super) struct Update<'a> {
    pub layout: &'a Layout,
    pub parts: &'a [Part],
    pub second_at: &'a [Option<usize>],
    pub first: Option<&'a mut Flat>,
    pub second: Option<&'a mut Flat>,
    pub sum: &'a Flat,
    pub rule: &'a Rule,
    pub matrices: &'a MatrixSteps,
}

impl Update<'_> {
    /// Updates one part, whose values begin at `at`.
    pub fn part(&mut self, index: usize, values: &mut Flat, at: usize) {
        let part = &self.parts[index];
        let (unit, len) = (&self.layout.units[part.unit], part.range.len());
        if let Some((step, factor)) = self.matrices.steps.get(index).cloned().flatten() {
            if let Some(buffer) = values.buffer() {
                let keep = if unit.decays { self.matrices.keep } else { 1.0 };
                return muon_step(step, &buffer.part(at..at + len), keep, factor);
            }
            let old = values.part(at..at + len);
            let kept = if unit.decays { old.mul_scalar(self.matrices.keep) } else { old };
            values.put(at, kept - step.mul_scalar(factor));
            return;
        }
        let here = part.at..part.at + len;
        let first = self.first.as_deref_mut().map(|flat| (flat, here.clone()));
        let second = self.second.as_deref_mut().zip(self.second_at[index]).map(|(flat, at)| (flat, at..at + len));
        let decays = unit.decays || self.rule.decays_vectors();
        let place = place(unit, &part.range);
        self.rule.update((values, at..at + len), (self.sum, here), first, second, (decays, place));
    }
}
