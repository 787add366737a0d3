//! How many GEMMs compute a matrix whose shards, one for each rank, DMA copy engines transfer. Pure arithmetic.
//!
//! Copies need no SMs, so GEMMs run at full rate, unlike next to NCCL's kernels (`chunks`), and shards may arrive one
//! by one. Each additional GEMM costs a partial last wave of tiles.

use gpu::model::GpuModel;
use layouts::gemm_split::{CHUNK_OVERHEAD, Gemm};
use std::ops::Range;

/// Minimum bytes per shard for DMA copies. NCCL has lower latency for smaller ones.
#[cfg(feature = "cuda")]
pub(crate) const MIN_COPY_BYTES: usize = 1 << 20;
/// Up to this number of shards all groupings of neighbours into GEMMs are tried.
const MAX_ENUMERATED: usize = 8;

/// The number of shards of each GEMM, in order of arrival: the local shard alone first, then those of the following
/// ranks. One GEMM of all shards if that is faster. `bytes` are those of a shard of the GEMM's input; `gemm` is that of
/// all shards.
pub(crate) fn gathered(shards: usize, gemm: &Gemm, bytes: usize) -> Vec<usize> {
    let seconds = |sizes: &[usize]| {
        let (mut now, mut arrived) = (0.0f64, 0);
        for size in sizes {
            arrived += size;
            // The local shard needs no copy, but it waits for the other ones in a single GEMM.
            let copies = if arrived == 1 { 0 } else { arrived - 1 + usize::from(sizes.len() == 1) };
            let arrival = if copies == 0 { 0.0 } else { copies_seconds(gemm.gpu, copies, bytes) };
            now = now.max(arrival) + multiply(gemm, shards, *size);
        }
        now
    };
    let rest = compositions(shards - 1).map(|rest| [vec![1], rest].concat());
    fastest(rest.chain([vec![shards]]), seconds)
}

/// The same for GEMMs whose outputs are summed over the ranks: the shards of the following ranks first, the local one
/// last. `bytes` are those of a shard of the output. Work that does not need the sum takes `after` seconds.
pub(crate) fn scattered(shards: usize, gemm: &Gemm, bytes: usize, after: f64) -> Vec<usize> {
    let sum = (shards + 1) as f64 * bytes as f64 / (gemm.gpu.operations.sum * gemm.gpu.bandwidth * 1e9);
    let seconds = |sizes: &[usize]| {
        let (mut now, mut copied, mut arrived) = (0.0f64, 0.0f64, 0);
        for size in sizes {
            now += multiply(gemm, shards, *size);
            let others = (arrived + size).min(shards - 1) - arrived.min(shards - 1);
            if others > 0 {
                copied = copied.max(now) + copies_seconds(gemm.gpu, others, bytes);
            }
            arrived += size;
        }
        (now + after).max(copied) + sum
    };
    fastest(compositions(shards), seconds)
}

/// The ranks at these offsets after `rank`, modulo `size`, as contiguous ranges; all ranks are one range.
pub(crate) fn runs(rank: usize, offsets: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let start = if offsets.len() == size { 0 } else { (rank + offsets.start) % size };
    let count = offsets.len();
    let end = (start + count).min(size);
    [start..end, 0..start + count - end].into_iter().filter(|run| !run.is_empty())
}

/// Seconds of so many copies, from the signal that the first shard is there.
fn copies_seconds(gpu: &GpuModel, count: usize, bytes: usize) -> f64 {
    let rates = &gpu.operations;
    rates.signal_latency + count as f64 * (rates.copy_latency + bytes as f64 / (rates.copy * gpu.link * 1e9))
}

fn multiply(gemm: &Gemm, shards: usize, count: usize) -> f64 {
    gemm.seconds(gemm.rows / shards * count, 1, 0) + CHUNK_OVERHEAD
}

/// All compositions of `shards` neighbours into GEMMs; for many shards only single ones, halves and all.
fn compositions(shards: usize) -> Box<dyn Iterator<Item = Vec<usize>>> {
    if shards > MAX_ENUMERATED {
        return Box::new([vec![1; shards], vec![shards / 2, shards - shards / 2], vec![shards]].into_iter());
    }
    Box::new((0..1usize << shards.saturating_sub(1)).map(move |ends| {
        let mut sizes = vec![0];
        for shard in 0..shards {
            *sizes.last_mut().expect("never empty") += 1;
            if shard + 1 < shards && ends >> shard & 1 == 1 {
                sizes.push(0);
            }
        }
        sizes
    }))
}

fn fastest(groupings: impl Iterator<Item = Vec<usize>>, seconds: impl Fn(&[usize]) -> f64) -> Vec<usize> {
    groupings.min_by(|a, b| seconds(a).total_cmp(&seconds(b))).expect("there is a grouping")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gemm(rows: usize, inner: usize, columns: usize) -> Gemm {
        Gemm { rows, inner, columns, element: 2, gpu: gpu::model::find("h200").unwrap() }
    }

    /// Llama 3 8B over four ranks, two sequences of 8,192 tokens: a shard is 4,096 by 4,096.
    const SHARD: usize = 4096 * 4096 * 2;

    #[test]
    fn a_long_gemm_hides_all_copies() {
        // The first layer of the MLP: the GEMM of the local shard takes as long as three copies.
        let sizes = gathered(4, &gemm(16384, 4096, 7168), SHARD);
        assert_eq!((sizes[0], sizes.iter().sum::<usize>()), (1, 4), "{sizes:?}");
        // The second: partial sums are copied during the GEMM of the local shard.
        let sizes = scattered(4, &gemm(16384, 3584, 4096), SHARD, 0.0);
        assert!(sizes.len() > 1 && sizes.last() == Some(&1), "{sizes:?}");
    }

    #[test]
    fn later_work_hides_the_copies_as_well() {
        let short = gemm(16384, 1536, 4096);
        assert!(scattered(4, &short, SHARD, 0.0).len() >= scattered(4, &short, SHARD, 1e-2).len());
        assert_eq!(scattered(4, &short, SHARD, 1e-2), [4]);
    }

    #[test]
    fn tiny_shards_share_a_gemm() {
        let tiny = gemm(512, 256, 256);
        // The local shard while the other ones are copied.
        assert_eq!(gathered(4, &tiny, 1 << 10), [1, 3]);
        assert_eq!(scattered(4, &tiny, 1 << 10, 0.0), [4]);
    }

    #[test]
    fn every_shard_is_in_one_gemm() {
        for shards in [2, 3, 4, 8, 16] {
            for (inner, columns) in [(64, 64), (4096, 1536), (14336, 4096)] {
                let gemm = gemm(2048 * shards, inner, columns);
                for sizes in [gathered(shards, &gemm, SHARD), scattered(shards, &gemm, SHARD, 0.0)] {
                    assert!(sizes.iter().sum::<usize>() == shards && !sizes.contains(&0), "{shards}: {sizes:?}");
                }
            }
        }
    }

    #[test]
    fn runs_go_around() {
        let all = |rank, offsets| runs(rank, offsets, 4).collect::<Vec<_>>();
        assert_eq!(all(1, 0..1), [1..2]);
        assert_eq!(all(1, 1..4), [2..4, 0..1]);
        assert_eq!(all(3, 1..3), [0..2]);
        assert_eq!([all(0, 1..5), all(2, 0..4)], [[0..4], [0..4]]);
        assert_eq!(all(2, 4..5), [2..3]);
    }

    /// Many schedules on the GPUs whose rates were measured, folded into one number.
    #[test]
    fn schedules_on_hopper_are_those_of_the_measured_rates() {
        let mut digest = 0xcbf2_9ce4_8422_2325u64;
        let mut fold = |shards: &usize| digest = (digest ^ *shards as u64).wrapping_mul(0x100_0000_01b3);
        for gpu in ["h100", "h200"].map(|name| ::gpu::model::find(name).unwrap()) {
            for (shards, rows) in [(2, 1024), (2, 8192), (4, 4096), (4, 16384), (8, 8192), (8, 65536), (16, 32768)] {
                for (inner, columns) in
                    [(256, 1024), (2048, 768), (4096, 3584), (3584, 4096), (14336, 4096), (8192, 28672)]
                {
                    let gemm = Gemm { gpu, ..gemm(rows, inner, columns) };
                    let [read, written] = [inner, columns].map(|width| rows / shards * width * 2);
                    gathered(shards, &gemm, read).iter().for_each(&mut fold);
                    scattered(shards, &gemm, written, 0.0).iter().for_each(&mut fold);
                    scattered(shards, &gemm, written, 2e-4).iter().for_each(&mut fold);
                }
            }
        }
        assert_eq!(digest, 2_051_006_908_765_283_669);
    }
}
