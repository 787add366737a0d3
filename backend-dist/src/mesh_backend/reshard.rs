//! Moves a tensor from one placement to another.

use super::inner::Inner;
use super::parts::{of_rank, shape, to_model_order, to_rank_order};
use super::report::Report;
use crate::logical::Placement::{self, Partial, Parts, Replicate, Shard, Strided, Varying};
use burn::backend::TensorMetadata;
use burn::tensor::{IntDType, Shape, Slice};
use burn_ir::HandleKind;
use ranks::collective_ops::Collective;
use ranks::comm::{Group, ReduceOp};

/// `x`, a rank's share of a tensor in the placements `from`, in the placements `to`, which must divide its shape. All
/// ranks of `groups`, one for each axis, must call this alike. The collectives are added to `report`. `meanwhile` runs while
/// one is on its way, and is given the bytes that a rank receives.
pub(super) fn reshard<B: Inner>(
    mut x: HandleKind<B>,
    (from, to): (&[Placement], &[Placement]),
    groups: &[Group],
    report: &mut Report,
    meanwhile: &mut dyn FnMut(usize),
) -> HandleKind<B> {
    let undone = undone((from, to));
    let parts =
        bytes(&x) * (0..groups.len()).filter(|&a| from[a].is_shard()).map(|a| groups[a].size()).product::<usize>();
    if let [axis] = undone[..] {
        return step(x, (from[axis], to[axis]), &groups[axis], (parts, report, meanwhile));
    }
    for &axis in undone.iter().rev() {
        x = step(x, (from[axis], Replicate), &groups[axis], (parts, report, meanwhile));
    }
    for &axis in &undone {
        x = step(x, (Replicate, to[axis]), &groups[axis], (parts, report, meanwhile));
    }
    x
}

/// The axes that change, or divide a dimension along which one does: these are undone from the last to the first, and done
/// again from the first.
fn undone((from, to): (&[Placement], &[Placement])) -> Vec<usize> {
    let changes = |axis: &usize| from[*axis] != to[*axis];
    let dims = |axis: usize| [from[axis].dim(), to[axis].dim()].into_iter().flatten();
    let touched: Vec<usize> = (0..from.len()).filter(changes).flat_map(dims).collect();
    let is_touched = |at: Placement| at.dim().is_some_and(|dim| touched.contains(&dim));
    (0..from.len()).filter(|axis| changes(axis) || is_touched(from[*axis])).collect()
}

/// The collective, and its axis, that alone brings a tensor from one placement to another.
pub(super) fn lone_collective(
    (from, to): (&[Placement], &[Placement]),
    groups: &[Group],
) -> Option<(usize, Collective)> {
    let [axis] = undone((from, to))[..] else { return None };
    let what = collective(from[axis], to[axis]).filter(|_| groups[axis].size() > 1)?;
    Some((axis, what))
}

/// The collective that brings a tensor from one placement to another along an axis.
fn collective(from: Placement, to: Placement) -> Option<Collective> {
    match (from, to) {
        (Shard(dim), Replicate) => Some(Collective::AllGather(dim)),
        (Partial, Replicate) => Some(Collective::AllReduce(ReduceOp::Sum)),
        (Partial, Shard(dim)) => Some(Collective::ReduceScatter(dim)),
        _ => None,
    }
}

/// As reports name it.
pub(super) fn name(what: &Collective) -> &'static str {
    match what {
        Collective::AllGather(_) => "all-gather",
        Collective::ReduceScatter(_) => "reduce-scatter",
        _ => "all-reduce",
    }
}

/// Along one axis.
fn step<B: Inner>(
    x: HandleKind<B>,
    (from, to): (Placement, Placement),
    group: &Group,
    (bytes, report, meanwhile): (usize, &mut Report, &mut dyn FnMut(usize)),
) -> HandleKind<B> {
    if from != to && (from.is_in_parts() || to.is_in_parts()) {
        return step_in_parts(x, (from, to), group, (bytes, report, meanwhile));
    }
    if let Some(what) = collective(from, to) {
        if group.size() > 1 {
            report.collective(name(&what), bytes);
        }
        return run_meanwhile(x, what, group, meanwhile);
    }
    match (from, to) {
        _ if from == to => x,
        (Replicate, Shard(dim)) => B::owned(slice(x, dim, group)),
        (Replicate, Partial) if group.rank() == 0 => x,
        (Replicate, Partial) => zeros(x),
        (Shard(from), Shard(to)) => {
            if group.size() > 1 {
                report.collective("all-to-all", bytes);
            }
            all_to_all(x, from, to, group)
        }
        (Shard(_), Partial) => unreachable!("no rule wants a sharded tensor as a sum"),
        // What varies is this rank's own, and stays so.
        (Replicate | Shard(_) | Partial | Strided { .. } | Parts { .. } | Varying, _) => x,
    }
}

/// Along one axis, to or from a tensor in parts.
fn step_in_parts<B: Inner>(
    x: HandleKind<B>,
    (from, to): (Placement, Placement),
    group: &Group,
    (bytes, report, meanwhile): (usize, &mut Report, &mut dyn FnMut(usize)),
) -> HandleKind<B> {
    let ranks = group.size();
    match (from, to) {
        (from, to) if from.is_shard() && to.is_shard() => {
            let x = step(x, (from, Replicate), group, (bytes, report, meanwhile));
            step(x, (Replicate, to), group, (bytes, report, meanwhile))
        }
        (Strided { dim, blocks }, other) | (other, Strided { dim, blocks }) => {
            // With the blocks as a dimension of their own the shard is a plain one.
            let mut split = shape(&x);
            split.splice(dim..=dim, [blocks, split[dim] / blocks]);
            let plain = |at: Placement| if at == other { other } else { Shard(dim + 1) };
            let x = step(reshape(x, split), (plain(from), plain(to)), group, (bytes, report, meanwhile));
            let mut merged = shape(&x);
            merged.splice(dim..=dim + 1, [merged[dim] * merged[dim + 1]]);
            reshape(x, merged)
        }
        (Parts { dim, .. }, _) => {
            let x = step(x, (Shard(dim), to), group, (bytes, report, meanwhile));
            to_model_order(x, from, ranks)
        }
        (Replicate, Parts { .. }) => of_rank(x, to, group.rank(), ranks),
        (_, Parts { dim, .. }) => {
            step(to_rank_order(x, to, ranks), (from, Shard(dim)), group, (bytes, report, meanwhile))
        }
        _ => unreachable!("one of them is in parts"),
    }
}

/// Blocks of dimension `to` change for blocks of dimension `from`: every rank sends each of the others one.
fn all_to_all<B: Inner>(x: HandleKind<B>, from: usize, to: usize, group: &Group) -> HandleKind<B> {
    let n = group.size();
    let shape = shape(&x);
    let rank = shape.len();
    let mut split = shape.clone();
    split[to] = part_of(&shape, to, n);
    // [.., n, to / n, ..], with the block's number first, one row each.
    let mut numbered = shape.clone();
    numbered.splice(to..=to, [n, shape[to] / n]);
    let first: Vec<usize> = [to].into_iter().chain((0..=rank).filter(|&dim| dim != to)).collect();
    let x = permute(reshape(x, numbered), &first);
    let sizes = split.iter().product();
    let x = reshape(x, vec![n, sizes]);
    let x = run_collective(x, Collective::AllToAll { send: vec![1; n], receive: vec![1; n] }, group);
    // [n, ..]: the sender's number goes in front of the dimension that it sharded.
    let x = reshape(x, [n].into_iter().chain(split.iter().copied()).collect());
    let back: Vec<usize> = (1..=from).chain([0]).chain(from + 1..=rank).collect();
    split[from] *= n;
    reshape(permute(x, &back), split)
}

/// Each rank's part of a dimension, which other axes may shard already.
///
/// # Panics
/// If the ranks do not divide it.
fn part_of(shape: &[usize], dim: usize, ranks: usize) -> usize {
    let size = shape[dim];
    let (below, above) = (size / ranks * ranks, (size / ranks + 1) * ranks);
    assert!(
        size.is_multiple_of(ranks),
        "Shard({dim}) of a tensor with a part of shape {shape:?} on this rank: {ranks} more ranks do not divide {size}; the \
         nearest sizes of the part are {below} and {above}"
    );
    size / ranks
}

/// A collective over `group`. `meanwhile` queues what the device computes while it is on its way, if that is possible, else
/// after it.
fn run_meanwhile<B: Inner>(
    x: HandleKind<B>,
    what: Collective,
    group: &Group,
    meanwhile: &mut dyn FnMut(usize),
) -> HandleKind<B> {
    let HandleKind::Float(x) = x else { return run_collective(x, what, group) };
    if let Some(result) = B::collective_by_dma(&x, &what, group, meanwhile) {
        return HandleKind::Float(result);
    }
    let bytes = received_bytes(&x, &what, group);
    if !B::is_async(group) {
        let result = B::collective(x, what, None, group.clone());
        meanwhile(bytes);
        return HandleKind::Float(result);
    }
    let (mut results, pending) = B::begin_async(vec![(x, what)], false, group);
    meanwhile(bytes);
    drop(pending);
    HandleKind::Float(results.remove(0))
}

/// What a rank receives in a collective of `x`.
fn received_bytes(x: &impl TensorMetadata, what: &Collective, group: &Group) -> usize {
    let (bytes, others) = (x.shape().num_elements() * x.dtype().size(), group.size() - 1);
    match what {
        Collective::AllGather(_) => bytes * others,
        Collective::AllReduce(_) => 2 * bytes / group.size() * others,
        Collective::Identity | Collective::Slice(_) => 0,
        _ => bytes / group.size() * others,
    }
}

/// A collective over `group`.
pub(super) fn run_collective<B: Inner>(x: HandleKind<B>, what: Collective, group: &Group) -> HandleKind<B> {
    match x {
        HandleKind::Float(x) => HandleKind::Float(B::collective(x, what, None, group.clone())),
        HandleKind::Int(x) => HandleKind::Int(B::collective_int(x, what, group.clone())),
        HandleKind::Bool(x) => {
            let dtype = x.dtype();
            let numbers = B::collective_int(B::bool_into_int(x, IntDType::I32), what, group.clone());
            HandleKind::Bool(B::int_not_equal_elem(numbers, 0.into(), dtype.into()))
        }
        HandleKind::Quantized(_) => unreachable!("quantized tensors are whole on every rank"),
    }
}

fn slice<B: Inner>(x: HandleKind<B>, dim: usize, group: &Group) -> HandleKind<B> {
    let shape = shape(&x);
    let part = part_of(&shape, dim, group.size());
    let mut ranges = vec![Slice::full(); shape.len()];
    ranges[dim] = Slice::from(group.rank() * part..(group.rank() + 1) * part);
    match x {
        HandleKind::Float(x) => HandleKind::Float(B::float_slice(x, &ranges)),
        HandleKind::Int(x) => HandleKind::Int(B::int_slice(x, &ranges)),
        HandleKind::Bool(x) => HandleKind::Bool(B::bool_slice(x, &ranges)),
        HandleKind::Quantized(_) => unreachable!("quantized tensors are whole on every rank"),
    }
}

fn zeros<B: Inner>(x: HandleKind<B>) -> HandleKind<B> {
    match x {
        HandleKind::Float(x) => HandleKind::Float(B::float_zeros(x.shape(), &x.device(), x.dtype().into())),
        HandleKind::Int(x) => HandleKind::Int(B::int_zeros(x.shape(), &x.device(), x.dtype().into())),
        HandleKind::Bool(_) | HandleKind::Quantized(_) => unreachable!("sums are of numbers"),
    }
}

fn reshape<B: Inner>(x: HandleKind<B>, shape: Vec<usize>) -> HandleKind<B> {
    let shape = Shape::from(shape);
    match x {
        HandleKind::Float(x) => HandleKind::Float(B::float_reshape(x, shape)),
        HandleKind::Int(x) => HandleKind::Int(B::int_reshape(x, shape)),
        HandleKind::Bool(x) => HandleKind::Bool(B::bool_reshape(x, shape)),
        HandleKind::Quantized(_) => unreachable!("quantized tensors are whole on every rank"),
    }
}

fn permute<B: Inner>(x: HandleKind<B>, axes: &[usize]) -> HandleKind<B> {
    match x {
        HandleKind::Float(x) => HandleKind::Float(B::float_permute(x, axes)),
        HandleKind::Int(x) => HandleKind::Int(B::int_permute(x, axes)),
        HandleKind::Bool(x) => HandleKind::Bool(B::bool_permute(x, axes)),
        HandleKind::Quantized(_) => unreachable!("quantized tensors are whole on every rank"),
    }
}

pub(super) fn bytes<B: Inner>(x: &HandleKind<B>) -> usize {
    let dtype = match x {
        HandleKind::Float(x) => x.dtype(),
        HandleKind::Int(x) => x.dtype(),
        HandleKind::Bool(x) => x.dtype(),
        HandleKind::Quantized(x) => x.dtype(),
    };
    shape(x).iter().product::<usize>() * dtype.size()
}
