//! Formulas that were recognized, or not: the layers of a model, and its steps, have the same.

use super::{Factors, Formula, Role};
use kernels_cubecl::fused::Program;
use std::collections::HashMap;

/// More are forgotten: their numbers seem to change from step to step.
const MOST: usize = 256;

/// By program and what it reads, with its numbers and the factors that its gradient is to have.
#[derive(Default)]
pub(in crate::mesh_backend::executor) struct Known(HashMap<(Program, Vec<Role>, Vec<u64>), Option<Factors>>);

impl Known {
    /// [`Formula::factors`].
    pub fn factors(&mut self, formula: &Formula) -> Option<Factors> {
        self.find(formula, &[], || formula.factors())
    }

    /// [`Formula::is_gradient`].
    pub fn is_gradient(&mut self, formula: &Formula, factors: Factors) -> bool {
        let numbers = [factors.scale, factors.kept];
        self.find(formula, &numbers, || formula.is_gradient(factors).then_some(factors)).is_some()
    }

    fn find(&mut self, formula: &Formula, numbers: &[f64], find: impl FnOnce() -> Option<Factors>) -> Option<Factors> {
        if self.0.len() >= MOST {
            self.0.clear();
        }
        let numbers = formula.scalars.iter().chain(numbers).map(|x| x.to_bits()).collect();
        *self.0.entry((formula.program.clone(), formula.roles.to_vec(), numbers)).or_insert_with(find)
    }
}
