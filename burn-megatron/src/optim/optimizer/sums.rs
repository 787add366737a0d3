//! Sums of gradients over ranks: data-parallel ranks, tensor parallel neighbours, the two copies of a tied weight.

use super::super::bucket::Bucket;
use super::Optimizer;
use backend_dist::buffer_collectives;
use backend_dist::collective::all_reduce;
use backend_dist::comm::{Group, ReduceOp};
use backend_dist::gpu::buffer::Buffer;
use backend_dist::mesh::GridKind;
use burn::tensor::{DType, Tensor};

impl Optimizer {
    /// Ends the bucket's contributions of one micro-batch. ZeRO 2 and 3 sum them over the ranks of a group, keep their
    /// shard and free the rest.
    pub fn complete(&mut self, bucket: usize) {
        if self.buckets[bucket].sharding.zero >= 2 {
            self.end_scatter_before(bucket);
        }
        let Bucket { layout, region, grads, sharding, .. } = &mut self.buckets[bucket];
        grads.complete(layout, region, sharding);
    }

    /// Ends the bucket's micro-batches of one step. ZeRO 0 and 1 sum over the data-parallel ranks, and then
    /// those that hold the same shard.
    pub fn reduce(&mut self, bucket: usize) {
        if self.buckets[bucket].sharding.zero == 1 && self.buckets[bucket].sharding.same_shard.size() > 1 {
            self.end_scatter_before(bucket);
        }
        let Bucket { layout, grads, sharding, .. } = &mut self.buckets[bucket];
        grads.reduce(layout, sharding);
        self.note_memory();
    }

    /// The reduce-scatter of one bucket overlaps with the backward pass of the next: more of them would keep their
    /// buckets' memory, and the sum between groups could not begin.
    fn end_scatter_before(&mut self, bucket: usize) {
        let before = self.scattered.insert(self.buckets[bucket].spec.grid(), bucket);
        before.into_iter().for_each(|before| self.buckets[before].grads.end_scatter());
    }

    /// Sums what is partial over tensor parallel neighbours (norms under sequence parallelism, key/value heads that
    /// several ranks share): one collective for all buckets and each size of a block.
    pub fn sum_partial(&mut self) {
        for (&(grid, size), group) in &self.neighbours {
            if self.sum_partial_at_once(grid, size, group) {
                continue;
            }
            let mut places = Vec::new();
            let buckets = self.buckets.iter().enumerate();
            for (index, bucket) in buckets.filter(|(_, bucket)| bucket.spec.grid() == grid) {
                let partial = bucket.parts.iter().filter(|part| bucket.layout.units[part.unit].partial == Some(size));
                places.extend(partial.map(|part| (index, part.at..part.at + part.range.len())));
            }
            if places.is_empty() || group.size() == 1 {
                continue;
            }
            let part = |(bucket, range): &(usize, _)| self.buckets[*bucket].grads.sum().part(Clone::clone(range));
            let summed = all_reduce(Tensor::cat(places.iter().map(part).collect(), 0), ReduceOp::Sum, group);
            let mut start = 0;
            for (bucket, range) in places {
                let part = summed.clone().slice([start..start + range.len()]);
                self.buckets[bucket].grads.sum_mut().put(range.start, part);
                start += range.len();
            }
        }
    }

    /// [`sum_partial`](Self::sum_partial) on GPUs, over blocks of one size: two launches a bucket. False elsewhere.
    fn sum_partial_at_once(&self, grid: GridKind, size: usize, group: &Group) -> bool {
        let mut pieces = Vec::new();
        for bucket in self.buckets.iter().filter(|bucket| bucket.spec.grid() == grid) {
            let (Some(launches), Some(sum)) = (&bucket.launches, bucket.grads.sum().buffer()) else { return false };
            if bucket.grads.sum().dtype() != DType::F32 {
                return false;
            }
            pieces.extend(launches.partial.get(&size).map(|table| (table, sum)));
        }
        let len: usize = pieces.iter().map(|(table, _)| table.len()).sum();
        if len == 0 || group.size() == 1 {
            return true;
        }
        let Some(packed) = Buffer::zeros(len, &self.device, DType::F32) else { return false };
        let mut start = 0;
        for (table, sum) in &pieces {
            table.collect(sum, &packed.part(start..len));
            start += table.len();
        }
        buffer_collectives::all_reduce(&packed, group).wait();
        start = 0;
        for (table, sum) in &pieces {
            table.distribute(&packed.part(start..len), sum);
            start += table.len();
        }
        true
    }

    /// Sums the bucket's gradients over the ranks that hold copies of its weights: first and last stage of a tied
    /// embedding. After [`reduce`](Self::reduce).
    pub fn sum_tied(&mut self, bucket: usize, group: &Group) {
        self.buckets[bucket].grads.sum_mut().all_reduce(group);
    }

    /// [`sum_tied`](Self::sum_tied) for two buckets of this rank with the same parameters.
    pub fn sum_tied_here(&mut self, a: usize, b: usize) {
        let len = self.buckets[b].grads.sum().len();
        let other = self.buckets[b].grads.sum().part(0..len);
        self.buckets[a].grads.sum_mut().add(0, other);
        let sum = self.buckets[a].grads.sum().part(0..len);
        self.buckets[b].grads.sum_mut().put(0, sum);
    }
}
