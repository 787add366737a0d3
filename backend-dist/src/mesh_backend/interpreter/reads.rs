//! Reads of ranks that run programs of their own.

use super::Interpreter;
use super::inputs::Local;
use crate::mesh_backend::inner::Inner;
use burn_ir::{TensorIr, TensorStatus};
use serde::{Deserialize, Serialize};

/// What a rank reads now, of which other ranks have shards. Errors name this type.
#[derive(Clone, Serialize, Deserialize)]
struct ShardedRead {
    tensor: TensorIr,
    /// Tensors that the rank's program has made.
    made: u64,
}

impl<B: Inner> Interpreter<B> {
    /// The whole of `x`, together with what the others read now.
    pub(super) fn placed_for_read(&mut self, x: &TensorIr, made: Option<u64>) -> Local {
        let whole = self.replicated().at;
        let entry = self.table.get(x.id);
        let is_here = entry.state.at == whole || entry.copies_in(&whole).next().is_some();
        let mut before = made.filter(|_| !is_here).map_or(Vec::new(), |made| self.read_by_all(x, made));
        let after = before.split_off(before.partition_point(|other| other.id < x.id));
        before.into_iter().for_each(|other| self.take_part(other));
        let local = self.place(x, &whole, x.status == TensorStatus::ReadWrite, false);
        after.into_iter().filter(|other| other.id != x.id).for_each(|other| self.take_part(other));
        local
    }

    /// What the ranks read now, in the order of ids, so that all gather it in one order: Burn's optimizers write their records
    /// in that of a hash map, which is another one on each rank. Nothing where ranks have not made as many tensors, whose ids
    /// say nothing then: reads meet in the order in which they come.
    fn read_by_all(&self, x: &TensorIr, made: u64) -> Vec<TensorIr> {
        let mut reads = vec![ShardedRead { tensor: TensorIr { status: TensorStatus::ReadOnly, ..x.clone() }, made }];
        for group in self.groups.iter().filter(|group| group.size() > 1) {
            reads = group.all_gather_host(reads).into_iter().flatten().collect();
        }
        if reads.iter().any(|read| read.made != made) {
            return Vec::new();
        }
        let mut tensors: Vec<TensorIr> = reads.into_iter().map(|read| read.tensor).collect();
        tensors.sort_by_key(|tensor| tensor.id);
        tensors.dedup_by_key(|tensor| tensor.id);
        tensors
    }
}
