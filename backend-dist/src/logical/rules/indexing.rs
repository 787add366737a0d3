//! Operations whose indices are data.

use super::{Completion, Decision, Operand, is_strided};
use crate::logical::Placement::{self, Partial, Replicate, Shard};

/// `out[i][j] = x[index[i][j]][j]` for `dim` 0: indices along `dim`, aligned along the others.
pub fn gather(x: Operand, index: Operand, dim: usize) -> Option<Decision> {
    if is_strided(&[x, index]) {
        return None;
    }
    let is_aligned = |i: usize| i != dim && x.shape[i] == index.shape[i];
    match (x.at, index.at) {
        (Shard(i), _) if is_aligned(i) => Decision::new([Shard(i), Shard(i)], Shard(i)),
        (Shard(i), _) if i == dim => masked([Shard(i), Replicate], Partial),
        (Shard(_), _) => None,
        (_, Shard(i)) if is_aligned(i) => Decision::new([Shard(i), Shard(i)], Shard(i)),
        (at, Shard(i)) if i == dim => Decision::new([no_sum(at), Shard(i)], Shard(i)),
        (_, Shard(_)) => None,
        (at, _) => Decision::new([at, Replicate], at),
    }
}

/// [`gather`]'s gradient: adds `value` to `x` at `index` along `dim`.
pub fn scatter_add(x: Operand, index: Operand, value: Operand, dim: usize) -> Option<Decision> {
    if is_strided(&[x, index, value]) {
        return None;
    }
    let is_aligned = |i: usize| i != dim && x.shape[i] == index.shape[i] && index.shape[i] == value.shape[i];
    let all = [x, index, value];
    if let Some(at) = all.iter().map(|x| x.at).find(|at| matches!(at, Shard(i) if is_aligned(*i))) {
        return Decision::new([at; 3], at);
    }
    let is_kept = [index, value].iter().all(|x| !x.at.is_shard());
    match (x.at, index.at, value.at) {
        (Shard(i), ..) if i == dim && is_kept => masked([Shard(i), Replicate, Replicate], Shard(i)),
        // What was gathered from is sharded, and so shall be its gradient.
        (Replicate, ..) if x.home == Some(Shard(dim)) && is_kept => {
            masked([Shard(dim), Replicate, Replicate], Shard(dim))
        }
        (Shard(_), ..) => None,
        // Each rank adds its own; one of them begins with `x`.
        (_, Shard(i), _) | (_, _, Shard(i)) if i == dim => Decision::new([Partial, Shard(dim), Shard(dim)], Partial),
        (_, Shard(_), _) | (_, _, Shard(_)) => None,
        (_, _, Partial) | (Partial, ..) => Decision::new([Partial, Replicate, Partial], Partial),
        _ => Decision::whole(3),
    }
}

/// The slices of `x` along `dim` that a one-dimensional `index` names.
pub fn select(x: Operand, index: Operand, dim: usize) -> Option<Decision> {
    if is_strided(&[x, index]) {
        return None;
    }
    match (x.at, index.at) {
        (Shard(i), _) if i != dim => Decision::new([Shard(i), Replicate], Shard(i)),
        (Shard(i), Replicate) => masked([Shard(i), Replicate], Partial),
        (Shard(_), _) => None,
        (at, Shard(_)) => Decision::new([no_sum(at), Shard(0)], Shard(dim)),
        (at, _) => Decision::new([at, Replicate], at),
    }
}

/// [`select`]'s gradient: adds the slices of `value` along `dim` to those of `x` that `index` names.
pub fn select_add(x: Operand, index: Operand, value: Operand, dim: usize) -> Option<Decision> {
    if is_strided(&[x, index, value]) {
        return None;
    }
    match (x.at, index.at, value.at) {
        (Shard(i), ..) | (_, _, Shard(i)) if i != dim => Decision::new([Shard(i), Replicate, Shard(i)], Shard(i)),
        (Shard(i), Replicate, Replicate | Partial) => masked([Shard(i), Replicate, Replicate], Shard(i)),
        (Shard(_), ..) => None,
        (_, Shard(_), _) | (_, _, Shard(_)) => Decision::new([Partial, Shard(0), Shard(dim)], Partial),
        (_, _, Partial) | (Partial, ..) => Decision::new([Partial, Replicate, Partial], Partial),
        _ => Decision::whole(3),
    }
}

/// Rows of `weights [v, h]` at `index [b, s]`: `[b, s, h]`.
pub fn embedding(weights: Operand, index: Operand) -> Option<Decision> {
    if is_strided(&[weights, index]) {
        return None;
    }
    match (weights.at, index.at) {
        (Shard(1), _) => Decision::new([Shard(1), Replicate], Shard(index.rank())),
        (Shard(0), Replicate) => masked([Shard(0), Replicate], Partial),
        (Shard(_), _) => None,
        (at, Shard(i)) => Decision::new([no_sum(at), Shard(i)], Shard(i)),
        (at, _) => Decision::new([at, Replicate], at),
    }
}

/// The gradient of `weights [v, h]`, of which the shape is read, from `grad [b, s, h]` and `index [b, s]`.
pub fn embedding_backward(weights: Operand, grad: Operand, index: Operand) -> Option<Decision> {
    if is_strided(&[weights, grad, index]) {
        return None;
    }
    let hidden = index.rank();
    match (weights.at, grad.at, index.at) {
        (Shard(1), ..) => Decision::new([Shard(1), Shard(hidden), Replicate], Shard(1)),
        (Shard(0), _, Replicate) => masked([Shard(0), Replicate, Replicate], Shard(0)),
        (_, Shard(i), _) if i == hidden => Decision::new([Shard(1), Shard(hidden), Replicate], Shard(1)),
        (_, Shard(i), _) | (_, _, Shard(i)) => Decision::new([Replicate, Shard(i), Shard(i)], Partial),
        (_, Partial, _) => Decision::new([Replicate, Partial, Replicate], Partial),
        (Shard(_), ..) => None,
        _ => Decision::whole(3),
    }
}

/// Each rank looks up what it has.
fn masked(inputs: impl Into<Vec<Placement>>, output: Placement) -> Option<Decision> {
    Decision::new(inputs, output).map(|decision| decision.completed(Completion::MaskIndices))
}

/// A sum that shards of something else select from has to be whole.
fn no_sum(at: Placement) -> Placement {
    if at == Partial { Replicate } else { at }
}
