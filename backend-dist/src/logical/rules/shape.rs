//! Operations that move elements and do not change them.

use super::{Decision, Operand, unary};
use crate::logical::Placement::{self, Partial, Parts, Replicate, Shard, Strided};
use burn::tensor::Slice;

/// The same elements in the same order under another shape, on an axis of `ranks` ranks.
///
/// A shard divides each of some number of equal runs of elements. It is a shard along the output's dimension in which
/// these runs begin and end.
pub fn reshape(x: Operand, out: &[usize], ranks: usize) -> Option<Decision> {
    let Some(dim) = x.at.dim() else { return unary(x, true, Some) };
    let runs = x.shape[..dim].iter().product::<usize>() * x.at.blocks();
    let before = |to: usize| out[..to].iter().product::<usize>();
    if let Parts { .. } = x.at {
        let is_there =
            |to: &usize| before(*to) == runs && out[*to] > 1 && x.at.along(*to).local_shape(out, ranks).is_some();
        return Decision::new([x.at], x.at.along((0..out.len()).find(is_there)?));
    }
    let along = |to: usize| {
        let before = before(to);
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

/// The elements of `x` in these ranges: of a sharded dimension all, or whole parts of it.
pub fn slice(x: Operand, ranges: &[Slice]) -> Option<Decision> {
    match x.at.is_shard() {
        true => Decision::new([x.at], x.at.sliced(x.shape, ranges)?),
        false => unary(x, true, Some),
    }
}

/// `x` with the region of these ranges replaced by `value`. Where whole parts of `x` are replaced it is in parts, as it is
/// already, or as the tensor was that such a `value` was taken from.
pub fn slice_assign(x: Operand, value: Operand, ranges: &[Slice]) -> Option<Decision> {
    let is_kept = |dim: usize| {
        let along = Shard(dim);
        along.sliced(x.shape, ranges) == Some(along)
    };
    aligned(&[x, value], is_kept).or_else(|| {
        let whole = [Some(x.at), x.home].into_iter().flatten();
        whole.filter_map(|at| Decision::new([at, at.sliced(x.shape, ranges)?], at)).next()
    })
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
