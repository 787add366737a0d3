//! Operations that compute each element of the output from the elements of the inputs at the same index.

use super::{Decision, Operand};
use crate::logical::Placement::{self, Partial, Replicate};

/// How the operation treats a sum of inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linearity {
    /// The output is linear in all inputs together: sums, differences, selections by position.
    Joint,
    /// The output is linear in each input alone: the elementwise product.
    Each,
    /// The output is linear in the first input alone: a quotient.
    First,
    /// Not linear.
    None,
}

/// Inputs of equal rank that broadcast along dimensions of size one.
///
/// A shard decides for all: slicing a replicated input costs nothing, and a sum is scattered instead of reduced.
pub fn elementwise(linearity: Linearity, inputs: &[Operand], out: &[usize]) -> Option<Decision> {
    if inputs.iter().any(|x| x.rank() != out.len()) {
        // Without shards there is nothing to align.
        return if inputs.iter().any(|x| x.at.is_shard()) { None } else { Decision::whole(inputs.len()) };
    }
    let sharded = |at: Placement| {
        let of = |x: &Operand| if at.dim().is_some_and(|dim| x.shape[dim] == 1) { Replicate } else { at };
        Decision::new(inputs.iter().map(of).collect::<Vec<_>>(), at)
    };
    if let Some(at) = shard_of_largest(inputs, out) {
        return sharded(at);
    }
    if let Some(partial) = partial(linearity, inputs, out) {
        return Decision::new(partial, Partial);
    }
    let home = inputs.iter().filter(|x| x.at == Partial && x.shape == out).find_map(|x| x.home);
    home.map_or_else(|| Decision::whole(inputs.len()), sharded)
}

/// The shard of the largest sharded input that the output can inherit.
fn shard_of_largest(inputs: &[Operand], out: &[usize]) -> Option<Placement> {
    let inherits = |x: &&Operand| x.at.dim().is_some_and(|dim| x.shape[dim] == out[dim]);
    // The first of equals.
    inputs.iter().rev().filter(inherits).max_by_key(|x| x.len()).map(|x| x.at)
}

/// Whether the sum can wait, which it does as long as the output is not larger than the summands.
fn partial(linearity: Linearity, inputs: &[Operand], out: &[usize]) -> Option<Vec<Placement>> {
    let summands: Vec<&Operand> = inputs.iter().filter(|x| x.at == Partial).collect();
    let largest = summands.iter().map(|x| x.len()).max()?;
    if largest < out.iter().product() {
        return None;
    }
    match linearity {
        // One rank adds a bias, or another gradient of the same tensor. If others read the sum as well, it had better be
        // reduced before what is as large as itself is added; also if that is wider, which makes the sum as wide.
        Linearity::Joint => {
            let ends = summands.iter().all(|x| x.ends && x.home.is_none() && !x.is_half);
            let can_join = |x: &Operand| x.at == Partial || x.len() < largest || ends;
            inputs.iter().all(can_join).then(|| vec![Partial; inputs.len()])
        }
        Linearity::Each if summands.len() == 1 => {
            let others = inputs.iter().filter(|x| x.at != Partial).map(Operand::len).max().unwrap_or(0);
            // A scalar is cheap. Anything else is likelier to meet the reduced sum in another operation.
            (others <= 1).then(|| inputs.iter().map(|x| x.at).collect())
        }
        Linearity::First if summands.len() == 1 && inputs[0].at == Partial => {
            let others = inputs[1..].iter().map(Operand::len).max().unwrap_or(0);
            (others <= 1).then(|| inputs.iter().map(|x| x.at).collect())
        }
        _ => None,
    }
}
