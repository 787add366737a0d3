//! Reductions over all elements, or over some dimensions that keep size one.

use super::{Completion, Decision, Operand, unary};
use crate::logical::Placement::{Partial, Replicate};

/// The sum over `dims`, which are sorted or not.
pub fn sum(x: Operand, dims: &[usize]) -> Option<Decision> {
    match x.at.dim() {
        Some(dim) if dims.contains(&dim) => Decision::new([x.at], Partial),
        _ => unary(x, true, Some),
    }
}

/// The mean over `dims` on an axis of `ranks` ranks: the mean of the shards' means.
pub fn mean(x: Operand, dims: &[usize], ranks: usize) -> Option<Decision> {
    let mut decision = sum(x, dims)?;
    if x.at.dim().is_some_and(|dim| dims.contains(&dim)) {
        decision.scale = Some(1.0 / ranks as f64);
    }
    Some(decision)
}

/// The maximum or minimum over `dims`: that of the shards, then over the ranks.
pub fn extremum(x: Operand, dims: &[usize], completion: Completion) -> Option<Decision> {
    match x.at.dim() {
        Some(dim) if dims.contains(&dim) => {
            Decision::new([x.at], Replicate).map(|decision| decision.completed(completion))
        }
        _ => other(x, dims),
    }
}

/// A reduction over `dims` whose shards cannot be reduced by a sum: maxima, multiplication, logic.
pub fn other(x: Operand, dims: &[usize]) -> Option<Decision> {
    unary(x, false, |dim| (!dims.contains(&dim)).then_some(dim))
}
