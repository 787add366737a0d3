//! Attention of `[b, heads, s, d]`: each sequence and each head alone.

use super::{Decision, Operand};
use crate::logical::Placement::{Replicate, Shard};

/// Any of the attention operations: `inputs` begin with the query and have four dimensions, or three (`logsumexp`); a
/// mask or bias may have size one where the query has more. Ranks that divide the heads of keys and values have with them
/// the heads of the queries that share them.
pub fn attention(inputs: &[Operand], outputs: usize) -> Option<Decision> {
    let query = inputs[0];
    let Some(at) = inputs.iter().map(|x| x.at).find(|at| at.is_shard()) else {
        return Decision::whole(inputs.len()).map(|decision| decision.with_outputs(outputs));
    };
    let Shard(dim @ (0 | 1)) = at else { return None };
    let shares = |x: &Operand| dim == 1 && query.shape[dim].is_multiple_of(x.shape[dim]);
    if !inputs.iter().all(|x| x.shape[dim] == query.shape[dim] || x.shape[dim] == 1 || shares(x)) {
        return None;
    }
    let side = |x: &Operand| if x.shape[dim] == 1 { Replicate } else { at };
    let decision = Decision::new(inputs.iter().map(side).collect::<Vec<_>>(), at)?;
    Some(decision.with_outputs(outputs))
}
