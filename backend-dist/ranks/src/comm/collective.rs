//! What a group does with a tensor, as plain data.

use serde::{Deserialize, Serialize};

/// How values of several ranks are reduced to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ReduceOp {
    /// Sum over the group.
    Sum,
    /// Maximum over the group.
    Max,
    /// Minimum over the group.
    Min,
}

impl ReduceOp {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Max => "max",
            Self::Min => "min",
        }
    }
}

/// What a group does with a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Collective {
    /// Nothing.
    Identity,
    /// Every member gets the reduction over all members.
    AllReduce(ReduceOp),
    /// Every member gets all members' tensors, concatenated along the dimension in group order.
    AllGather(usize),
    /// Every member gets its shard, along the dimension, of the sum over all members.
    ReduceScatter(usize),
    /// Every member takes its shard along the dimension; nothing is sent.
    Slice(usize),
    /// Every member gets the tensor of this member.
    Broadcast(usize),
    /// This member gets the sum over all members; the others keep their tensors.
    Reduce(usize),
    /// Rows of dimension 0 change owner.
    AllToAll {
        /// Rows for each member.
        send: Vec<usize>,
        /// Rows from each member.
        receive: Vec<usize>,
    },
}
