//! All-to-alls of tokens that overlap this rank's computation, by DMA copy engines or NCCL.

use burn::backend::Cube;

use super::{Float, columns, empty};
use crate::moe::{Splits, TokenAllToAll, all_to_all_matrices, append_chunk, concat_chunks};
use gpu::cuda::dense;
use ranks::comm::Group;
use ranks::nccl::{connect, gpu_of};
use ranks::overlap::all_to_all::{RowRange, all_to_all};
use ranks::overlap::{Pending, dma};

/// Tokens that are being received, or that the host has transferred already.
pub struct PendingTokens {
    matrices: Vec<Float>,
    pending: Option<Pending>,
}

/// Matrices that are received chunk by chunk: as lists of chunks from the host, else into one buffer each.
pub struct ChunkedTokens {
    chunks: Vec<Vec<Float>>,
    matrices: Vec<Float>,
    /// Number of rows, and of rows with a received chunk so far.
    rows: [usize; 2],
    pending: Vec<Pending>,
}

impl TokenAllToAll for Cube {
    type Pending = PendingTokens;
    type Chunked = ChunkedTokens;

    fn uses_sms(x: &Float, group: &Group) -> bool {
        !dma::are_available_on(x, group)
    }

    fn start(x: &[Float], first: usize, splits: &Splits, group: &Group) -> PendingTokens {
        if !is_linked(x, group) {
            return PendingTokens { matrices: all_to_all_matrices::<Self>(x, first, splits, group), pending: None };
        }
        let rows = |x: &Float| {
            let from = dense(x.clone());
            let to = empty(&from, [splits.received(), columns(&from)], from.dtype);
            RowRange { from, first, to, at: 0 }
        };
        let rows: Vec<RowRange> = x.iter().map(rows).collect();
        let pending = all_to_all(&rows, splits, group);
        PendingTokens { matrices: rows.into_iter().map(|rows| rows.to).collect(), pending: Some(pending) }
    }

    fn received(PendingTokens { matrices, pending }: PendingTokens) -> Vec<Float> {
        drop(pending);
        matrices
    }

    fn empty(rows: usize) -> ChunkedTokens {
        ChunkedTokens { chunks: Vec::new(), matrices: Vec::new(), rows: [rows, 0], pending: Vec::new() }
    }

    fn append(x: Vec<Float>, splits: &Splits, group: &Group, output: &mut ChunkedTokens) {
        let ChunkedTokens { chunks, matrices, rows: [all, at], pending } = output;
        if !is_linked(&x, group) {
            return append_chunk::<Self>(x, splits, group, chunks);
        }
        if matrices.is_empty() {
            matrices.extend(x.iter().map(|x| empty(x, [*all, columns(x)], x.dtype)));
        }
        let rows = |(from, to): (Float, &Float)| RowRange { from: dense(from), first: 0, to: to.clone(), at: *at };
        let rows: Vec<RowRange> = x.into_iter().zip(&*matrices).map(rows).collect();
        pending.push(all_to_all(&rows, splits, group));
        *at += splits.received();
    }

    fn concat(ChunkedTokens { chunks, matrices, pending, .. }: ChunkedTokens) -> Vec<Float> {
        drop(pending);
        if matrices.is_empty() { concat_chunks::<Self>(chunks) } else { matrices }
    }
}

/// Whether `group` has an NCCL link; the first call is a collective.
fn is_linked(x: &[Float], group: &Group) -> bool {
    connect(group, gpu_of(&x[0].device)).is_some()
}
