//! Rows that change owner while this rank computes, by copy engines or over NCCL.

use burn::backend::Cube;

use super::{Float, columns, empty};
use crate::comm::Group;
use crate::cuda::dense;
use crate::nccl::{connect, gpu_of};
use crate::ops::moe::{Splits, Travel, append, below_each_other, exchanged};
use crate::overlap::rows::{Rows, all_to_all};
use crate::overlap::{Pending, copies};

/// Rows on their way, or here where the host has carried them.
pub struct Coming {
    matrices: Vec<Float>,
    pending: Option<Pending>,
}

/// Matrices whose rows come piece by piece: in lists where the host carries them, else to their place.
pub struct Joined {
    pieces: Vec<Vec<Float>>,
    matrices: Vec<Float>,
    /// Rows in all, and those that have a place by now.
    rows: [usize; 2],
    pending: Vec<Pending>,
}

impl Travel for Cube {
    type Coming = Coming;
    type Joined = Joined;

    fn takes_processors(x: &Float, group: &Group) -> bool {
        !copies::carry_from(x, group)
    }

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

    fn none_of(rows: usize) -> Joined {
        Joined { pieces: Vec::new(), matrices: Vec::new(), rows: [rows, 0], pending: Vec::new() }
    }

    fn join(x: Vec<Float>, splits: &Splits, group: &Group, joined: &mut Joined) {
        let Joined { pieces, matrices, rows: [all, at], pending } = joined;
        if !is_linked(&x, group) {
            return append::<Self>(x, splits, group, pieces);
        }
        if matrices.is_empty() {
            matrices.extend(x.iter().map(|x| empty(x, [*all, columns(x)], x.dtype)));
        }
        let rows = |(from, to): (Float, &Float)| Rows { from: dense(from), first: 0, to: to.clone(), at: *at };
        let rows: Vec<Rows> = x.into_iter().zip(&*matrices).map(rows).collect();
        pending.push(all_to_all(&rows, splits, group));
        *at += splits.received();
    }

    fn joined(Joined { pieces, matrices, pending, .. }: Joined) -> Vec<Float> {
        drop(pending);
        if matrices.is_empty() { below_each_other::<Self>(pieces) } else { matrices }
    }
}

/// Whether NCCL carries the exchanges of `group`; its first call is collective.
fn is_linked(x: &[Float], group: &Group) -> bool {
    connect(group, gpu_of(&x[0].device)).is_some()
}
