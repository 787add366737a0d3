//! Attention of `[b, heads, s, d]`: each sequence and each head alone.

use super::{Decision, Operand};
use crate::logical::Placement::{Replicate, Shard};

/// Any of the attention operations: `inputs` begin with the query and have four dimensions, or three (`logsumexp`); a
/// mask or bias may have size one where the query has more.
pub fn attention(inputs: &[Operand], outputs: usize) -> Option<Decision> {
    let query = inputs[0];
    let Some(at) = inputs.iter().map(|x| x.at).find(|at| at.is_shard()) else {
        return Decision::whole(inputs.len()).map(|decision| decision.with_outputs(outputs));
    };
    let Shard(dim @ (0 | 1)) = at else { return None };
    // Grouped queries: heads of the query and of the key are not the same.
    let same = |x: &Operand| x.shape[dim] == query.shape[dim] || x.shape[dim] == 1;
    if !inputs.iter().all(same) {
        return None;
    }
    let side = |x: &Operand| if x.shape[dim] == 1 { Replicate } else { at };
    let decision = Decision::new(inputs.iter().map(side).collect::<Vec<_>>(), at)?;
    Some(decision.with_outputs(outputs))
}
