//! Rows that change owner while this rank computes, over NCCL.

use burn::backend::Cube;

use super::{Float, columns, empty};
use crate::comm::Group;
use crate::cuda::dense;
use crate::nccl::{connect, gpu_of};
use crate::ops::moe::{Splits, Travel, append, below_each_other, exchanged};
use crate::overlap::Pending;
use crate::overlap::rows::{Rows, all_to_all};

/// Rows on their way, or here where the host has carried them.
pub struct Coming {
    matrices: Vec<Float>,
    pending: Option<Pending>,
}

/// Matrices whose rows come piece by piece.
pub enum Joined {
    /// By the host.
    Pieces(Vec<Vec<Float>>),
    /// To their place.
    Whole {
        matrices: Vec<Float>,
        /// Rows that have a place by now.
        rows: usize,
        pending: Vec<Pending>,
    },
}

impl Travel for Cube {
    type Coming = Coming;
    type Joined = Joined;

    fn start(x: &[Float], first: usize, splits: &Splits, group: &Group) -> Coming {
        if !is_linked(x, group) {
            return Coming { matrices: exchanged::<Self>(x, first, splits, group), pending: None };
        }
        let rows = |x: &Float| {
            let from = dense(x.clone());
            let to = empty(&from, [splits.received(), columns(&from)], from.dtype);
            Rows { from, first, to, at: 0 }
        };
        let rows: Vec<Rows> = x.iter().map(rows).collect();
        let pending = all_to_all(&rows, splits, group);
        Coming { matrices: rows.into_iter().map(|rows| rows.to).collect(), pending: Some(pending) }
    }

    fn arrived(Coming { matrices, pending }: Coming) -> Vec<Float> {
        drop(pending);
        matrices
    }

    fn room(like: &[Float], rows: usize, group: &Group) -> Joined {
        if !is_linked(like, group) {
            return Joined::Pieces(like.iter().map(|_| Vec::new()).collect());
        }
        let matrices = like.iter().map(|x| empty(x, [rows, columns(x)], x.dtype)).collect();
        Joined::Whole { matrices, rows: 0, pending: Vec::new() }
    }

    fn join(x: Vec<Float>, splits: &Splits, group: &Group, joined: &mut Joined) {
        match joined {
            Joined::Pieces(pieces) => append::<Self>(x, splits, group, pieces),
            Joined::Whole { matrices, rows, pending } => {
                let to = x.into_iter().zip(&*matrices);
                let all: Vec<Rows> =
                    to.map(|(from, to)| Rows { from: dense(from), first: 0, to: to.clone(), at: *rows }).collect();
                pending.push(all_to_all(&all, splits, group));
                *rows += splits.received();
            }
        }
    }

    fn joined(joined: Joined) -> Vec<Float> {
        match joined {
            Joined::Pieces(pieces) => below_each_other::<Self>(pieces),
            Joined::Whole { matrices, pending, .. } => {
                drop(pending);
                matrices
            }
        }
    }
}

/// Whether NCCL carries the exchanges of `group`; its first call is collective.
fn is_linked(x: &[Float], group: &Group) -> bool {
    connect(group, gpu_of(&x[0].device)).is_some()
}
