//! Operations that move elements and do not change them.

use super::{Decision, Operand, unary};
use crate::logical::Placement::{self, Partial, Replicate, Shard, Strided};

/// The same elements in the same order under another shape, on an axis of `ranks` ranks.
///
/// A shard divides each of some number of equal runs of elements. It is a shard along the output's dimension in which
/// these runs begin and end.
pub fn reshape(x: Operand, out: &[usize], ranks: usize) -> Option<Decision> {
    let Some(dim) = x.at.dim() else { return unary(x, true, Some) };
    let runs = x.shape[..dim].iter().product::<usize>() * x.at.blocks();
    let along = |to: usize| {
        let before: usize = out[..to].iter().product();
        let blocks = (before > 0 && runs.is_multiple_of(before)).then(|| runs / before)?;
        let is_divided = blocks > 0 && out[to] > 1 && out[to].is_multiple_of(blocks * ranks);
        is_divided.then_some(if blocks == 1 { Shard(to) } else { Strided { dim: to, blocks } })
    };
    let mut possible: Vec<Placement> = (0..out.len()).filter_map(along).collect();
    possible.sort_by_key(|at| at.blocks());
    Decision::new([x.at], *possible.first()?)
}

/// Dimension `axes[i]` of the input becomes dimension `i`.
pub fn permute(x: Operand, axes: &[usize]) -> Option<Decision> {
    unary(x, true, |dim| axes.iter().position(|&axis| axis == dim))
}

/// Broadcast to `out`: dimensions of size one grow, and new ones come first.
pub fn expand(x: Operand, out: &[usize]) -> Option<Decision> {
    let new = out.len() - x.rank();
    unary(x, true, |dim| (out[dim + new] == x.shape[dim]).then_some(dim + new))
}

/// The elements of `x` at regular positions; `kept` are the dimensions of which all are taken, in order.
pub fn slice(x: Operand, kept: &[bool]) -> Option<Decision> {
    unary(x, true, |dim| kept.get(dim).copied().unwrap_or(true).then_some(dim))
}

/// `x` with a region replaced by `value`; `kept` are the dimensions that the region covers.
pub fn slice_assign(x: Operand, value: Operand, kept: &[bool]) -> Option<Decision> {
    aligned(&[x, value], |dim| kept.get(dim).copied().unwrap_or(true))
}

/// Inputs one after the other along `dim`.
pub fn cat(inputs: &[Operand], dim: usize) -> Option<Decision> {
    aligned(inputs, |sharded| sharded != dim)
}

/// Inputs that are aligned along the dimensions for which `may_shard` holds, in an operation that is linear in all of
/// them together.
fn aligned(inputs: &[Operand], may_shard: impl Fn(usize) -> bool) -> Option<Decision> {
    let mut shards = inputs.iter().filter(|x| x.at.is_shard()).map(|x| x.at).peekable();
    if shards.peek().is_some() {
        let at = shards.find(|at| at.dim().is_some_and(&may_shard))?;
        return Decision::new(vec![at; inputs.len()], at);
    }
    let at = if inputs.iter().any(|x| x.at == Partial) { Partial } else { Replicate };
    Decision::new(vec![at; inputs.len()], at)
}

/// The whole tensor `times` times along `dim`.
pub fn repeat(x: Operand, dim: usize) -> Option<Decision> {
    super::along(x, dim, true)
}

/// A tensor made of nothing is whole everywhere.
pub fn created() -> Option<Decision> {
    Decision::new(Vec::<Placement>::new(), Replicate)
}
