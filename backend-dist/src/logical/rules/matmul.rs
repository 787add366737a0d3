//! `[.., m, k] x [.., k, n] -> [.., m, n]`, with dimensions before the last two that broadcast.

use super::{Decision, Operand, Policy};
use crate::logical::Placement::{self, Partial, Replicate};

/// Where a sharded activation meets a sharded weight, `policy` says which of them is gathered.
pub fn matmul(lhs: Operand, rhs: Operand, policy: Policy) -> Option<Decision> {
    let rank = lhs.rank();
    if rhs.rank() != rank || rank < 2 {
        return if lhs.at.is_shard() || rhs.at.is_shard() { None } else { Decision::whole(2) };
    }
    let (m, n) = (rank - 2, rank - 1);
    // The contracted dimension is another one in each operand.
    let (k_of_lhs, k_of_rhs) = (n, m);
    let rows = || Decision::new([lhs.at, Replicate], lhs.at);
    let columns = || Decision::new([Replicate, rhs.at], rhs.at);
    let contracted = |at: Placement| Decision::new([at.along(k_of_lhs), at.along(k_of_rhs)], Partial);
    let batch = |at: Placement, dim: usize| {
        let side = |x: Operand| if x.shape[dim] == 1 { Replicate } else { at };
        Decision::new([side(lhs), side(rhs)], at)
    };
    let dims = (lhs.at.dim(), rhs.at.dim());
    if policy == Policy::WeightsStay {
        match dims {
            (_, Some(dim)) if rhs.weight && dim == n => return columns(),
            (_, Some(dim)) if rhs.weight && dim == k_of_rhs => return contracted(rhs.at),
            (Some(dim), _) if lhs.weight && dim == m => return rows(),
            (Some(dim), _) if lhs.weight && dim == k_of_lhs => return contracted(lhs.at),
            _ => {}
        }
    }
    // A weight whose activation is sharded does not decide.
    let moves = |x: Operand, other: Operand| x.weight && other.at.is_shard() && policy == Policy::WeightsMove;
    let (lhs_decides, rhs_decides) = (!moves(lhs, rhs), !moves(rhs, lhs));
    match dims {
        // A gradient of a weight: with the features it stays, and with the samples it would be a sum to reduce.
        (Some(dim), Some(other)) if dim < m && other == n && lhs_decides && rhs_decides => columns(),
        (Some(other), Some(dim)) if dim < m && other == m && lhs_decides && rhs_decides => rows(),
        (Some(dim), _) if lhs_decides && dim < m => batch(lhs.at, dim),
        (_, Some(dim)) if rhs_decides && dim < m => batch(rhs.at, dim),
        (Some(i), Some(j)) if i == k_of_lhs && j == k_of_rhs => contracted(lhs.at),
        (Some(dim), _) if lhs_decides && dim == m => rows(),
        (_, Some(dim)) if rhs_decides && dim == n => columns(),
        (Some(_), _) => contracted(lhs.at),
        (None, Some(_)) => contracted(rhs.at),
        (None, None) => Decision::whole(2),
    }
}
