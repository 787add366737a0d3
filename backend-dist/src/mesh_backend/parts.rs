//! Tensors that are sharded in parts of different sizes: what a rank holds are its shares of all parts, one after the other.
//! Collectives give or take what ranks hold one rank after the other.

use super::inner::Inner;
use crate::logical::Placement;
use burn::backend::TensorMetadata;
use burn::tensor::Slice;
use burn_ir::HandleKind;
use std::ops::Range;

/// What rank `rank` of `ranks` holds of the whole `x` in the placement `at`.
pub(super) fn of_rank<B: Inner>(x: HandleKind<B>, at: Placement, rank: usize, ranks: usize) -> HandleKind<B> {
    let (dim, parts) = parts(&x, at);
    let share = |(start, size): (usize, usize)| {
        let share = size / ranks;
        start + rank * share..start + (rank + 1) * share
    };
    pieces(&x, dim, parts.into_iter().map(share).collect())
}

/// The whole `x` with what every rank holds in the placement `at` one rank after the other.
pub(super) fn to_rank_order<B: Inner>(x: HandleKind<B>, at: Placement, ranks: usize) -> HandleKind<B> {
    let (dim, parts) = parts(&x, at);
    let share = |rank: usize| {
        parts.iter().map(move |&(start, size)| {
            let share = size / ranks;
            start + rank * share..start + (rank + 1) * share
        })
    };
    pieces(&x, dim, (0..ranks).flat_map(share).collect())
}

/// The whole tensor whose [rank order](to_rank_order) is `x`.
pub(super) fn to_model_order<B: Inner>(x: HandleKind<B>, at: Placement, ranks: usize) -> HandleKind<B> {
    let (dim, parts) = parts(&x, at);
    let held = shape(&x)[dim] / ranks;
    let shares = |(start, size): (usize, usize)| {
        (0..ranks).map(move |rank| {
            let first = rank * held + start / ranks;
            first..first + size / ranks
        })
    };
    pieces(&x, dim, parts.into_iter().flat_map(shares).collect())
}

/// The dimension, and start and size of every part in the whole `x`.
fn parts<B: Inner>(x: &HandleKind<B>, at: Placement) -> (usize, Vec<(usize, usize)>) {
    let dim = at.dim().expect("parts are of a dimension");
    let mut start = 0;
    let sizes = at.part_sizes(shape(x)[dim]).expect("the parts divide the dimension");
    let part = |size| {
        start += size;
        (start - size, size)
    };
    (dim, sizes.into_iter().map(part).collect())
}

fn pieces<B: Inner>(x: &HandleKind<B>, dim: usize, ranges: Vec<Range<usize>>) -> HandleKind<B> {
    let before = vec![Slice::full(); dim];
    let slices = ranges.into_iter().map(|range| [&before[..], &[Slice::from(range)]].concat());
    match x {
        HandleKind::Float(x) => {
            HandleKind::Float(B::float_cat(slices.map(|range| B::float_slice(x.clone(), &range)).collect(), dim))
        }
        HandleKind::Int(x) => {
            HandleKind::Int(B::int_cat(slices.map(|range| B::int_slice(x.clone(), &range)).collect(), dim))
        }
        HandleKind::Bool(x) => {
            HandleKind::Bool(B::bool_cat(slices.map(|range| B::bool_slice(x.clone(), &range)).collect(), dim))
        }
        HandleKind::Quantized(_) => unreachable!("quantized tensors are whole on every rank"),
    }
}

pub(super) fn shape<B: Inner>(x: &HandleKind<B>) -> Vec<usize> {
    match x {
        HandleKind::Float(x) => x.shape().to_vec(),
        HandleKind::Int(x) => x.shape().to_vec(),
        HandleKind::Bool(x) => x.shape().to_vec(),
        HandleKind::Quantized(x) => x.shape().to_vec(),
    }
}
