//! The norm of the gradients of the whole model, with the same bits in every layout that adds up the same numbers.

use super::super::box_runs::box_runs;
use super::super::bucket::Bucket;
use super::super::layout::Unit;
use super::Optimizer;
use backend_dist::comm::Group;
use backend_dist::gpu::buffer::{self, Buffer, ChunkTable};
use backend_dist::mesh::GridKind;
use std::ops::Range;

impl Optimizer {
    /// Norm of the gradients of the whole model times `scale`, every element counted once; the same bits on all ranks,
    /// and NaN or infinite on all if it is on one. `model_parallel` are, for each grid on which any rank has
    /// parameters, the ranks that together hold these once.
    ///
    /// Squares are summed by bucket, shard and rank, and these sums in the order of
    /// [`key`](crate::optim::layout::BucketSpec::key), so that neither the pipeline nor ZeRO changes a bit of it.
    pub fn norm(&self, scale: f64, model_parallel: &[(GridKind, Group)]) -> f64 {
        self.norm_and_squares(model_parallel).0 * scale
    }

    /// [`norm`](Self::norm) without a scale, and its sums of squares by [`key`](crate::optim::BucketSpec::key).
    pub fn norm_and_squares(&self, model_parallel: &[(GridKind, Group)]) -> (f64, Vec<(usize, f64)>) {
        let all = self.of_all(&self.squares(), model_parallel);
        let norm = all.iter().map(|(_, sum)| sum).sum::<f64>().sqrt();
        (norm, all.into_iter().map(|((key, ..), sum)| (key, sum)).collect())
    }

    /// Elements of the model whose gradient is zero, once the norm is known (Megatron's `--log-num-zeros-in-grad`).
    pub fn zeros_in_grad(&self, model_parallel: &[(GridKind, Group)]) -> u64 {
        let by_bucket = |bucket: &Bucket| {
            let ranges: Vec<_> = bucket.counted.iter().flat_map(|(_, ranges)| ranges.clone()).collect();
            let zeros = bucket.grads.sum().count_zeros(&ranges);
            zeros.into_iter().zip(&ranges).map(|(zeros, range)| zeros - padding(bucket, range) as f64).collect()
        };
        let counts: Vec<Vec<f64>> = self.buckets.iter().map(by_bucket).collect();
        self.of_all(&counts, model_parallel).into_iter().map(|(_, count)| count as u64).sum()
    }

    /// What the ranks have summed by bucket and counted range, by the place of each in the model: key, shard and rank.
    fn of_all(&self, sums: &[Vec<f64>], model_parallel: &[(GridKind, Group)]) -> Vec<((usize, usize, usize), f64)> {
        let mut all = Vec::new();
        for (grid, holders) in model_parallel {
            let of_grid = || self.buckets.iter().zip(sums).filter(|(bucket, _)| bucket.spec.grid() == *grid);
            let mut own = Vec::new();
            for (Bucket { spec, counted, .. }, sums) in of_grid() {
                let mut sums = sums.iter();
                for (shard, ranges) in counted {
                    own.push((spec.key, *shard, sums.by_ref().take(ranges.len()).sum::<f64>()));
                }
            }
            // All ranks that hold the same buckets have some, or none.
            // Groups have the same bits: each gathers its own.
            if let Some((Bucket { sharding, .. }, _)) = of_grid().next() {
                own = sharding.shards.all_gather_host(own).concat();
            }
            let ranks = holders.all_gather_host(own).into_iter().enumerate();
            let placed = |(rank, of): (usize, Vec<_>)| {
                of.into_iter().map(move |(key, shard, sum): (usize, usize, f64)| ((key, shard, rank), sum))
            };
            all.extend(ranks.flat_map(placed));
        }
        // Under one key and shard of a rank there may be a tied copy's zero; in any order that adds nothing.
        all.sort_by_key(|(place, _)| *place);
        all
    }

    /// By bucket, the sum of squares of each range that the rank counts.
    fn squares(&self) -> Vec<Vec<f64>> {
        fn on_gpu(bucket: &Bucket) -> Option<(&Buffer, &ChunkTable)> {
            Some((bucket.grads.buffer()?, &bucket.launches.as_ref()?.counted))
        }
        // One wait of the host for all of them; the GPU waits for each sum over the data-parallel ranks where it needs it, so
        // that the squares of the others overlap with the last sums.
        if let Some(buffers) = self.buckets.iter().map(on_gpu).collect::<Option<Vec<_>>>() {
            return buffer::squares(&buffers, |bucket| self.buckets[bucket].grads.wait());
        }
        let by_bucket = |Bucket { grads, counted, .. }: &Bucket| {
            let ranges: Vec<_> = counted.iter().flat_map(|(_, ranges)| ranges.clone()).collect();
            grads.sum().squares(&ranges)
        };
        self.buckets.iter().map(by_bucket).collect()
    }
}

/// Elements of a counted range that are no elements of the model.
fn padding(bucket: &Bucket, range: &Range<usize>) -> usize {
    let at = range.start + bucket.region.start;
    let unit = bucket.layout.units.iter().find(|unit| unit.range.contains(&at));
    let inside = |unit: &Unit| {
        let start = at - unit.range.start;
        let boxes = box_runs(&unit.section, start..start + range.len());
        boxes.iter().flat_map(|piece| &piece.runs).map(ExactSizeIterator::len).sum::<usize>()
    };
    range.len() - unit.map_or(0, inside)
}
