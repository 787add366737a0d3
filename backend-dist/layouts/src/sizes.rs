//! Sizes that operations work with, and that a plan of their memory has to know.

/// Default for the logits that a rank holds at a time: 4 GiB in half precision.
pub const LOGITS_AT_ONCE: usize = 1 << 31;

/// How many of `positions`, each with `logits` logits on this rank, a head computes at a time if it may hold `at_once`
/// logits: all, or equal chunks of at most half as many logits. A chunked head computes its GEMM twice, which an excess
/// of up to a sixteenth is not worth.
pub fn positions_at_once(positions: usize, logits: usize, at_once: usize) -> usize {
    if positions.saturating_mul(logits) <= at_once.saturating_add(at_once / 16) {
        return positions.max(1);
    }
    let most = (at_once / 2 / logits.max(1)).max(1);
    positions.div_ceil(positions.div_ceil(most))
}

/// Elements of a piece of optimizer states: 32 MB of an fp32 state, which DMA copy engines move at their full rate.
pub const PIECE: usize = 1 << 23;
/// Pieces that are in GPU memory at a time: one is loaded, one updated, one stored.
pub const SLOTS: usize = 3;

/// Activations on their way to host memory whose device memory is still held: their copies are hidden by the passes of so
/// many segments.
pub const LENT: usize = 2;

/// GPU tensors below this many bytes have buffers of their exact size.
const LARGE: usize = 32 << 20;

/// The size class of a GPU tensor of `bytes`: rounded up to one of eight sizes between two powers of two.
///
/// CubeCL allocates buffers from pages as large as the largest one so far. With sizes that change from step to step,
/// such as those of experts' tokens, it would repeatedly switch to larger pages while the old ones are still in use,
/// and no gap in a page would fit the next buffer.
pub fn size_class(bytes: usize) -> usize {
    if bytes < LARGE { bytes } else { bytes.next_multiple_of(bytes.next_power_of_two() / 16) }
}

/// Rows of a group's matrix that the grouped GEMM of GPUs takes multiples of. The A of experts' adapters are padded with
/// zeros to so many: without that kernel every expert would be several launches.
pub const EXPERT_WIDTH: usize = 64;

/// Bytes into which GEMMs of a CPU rank pack their operands, whatever their sizes: a panel as large as this machine's
/// L2 cache (`L2_SLAB` in gemm-common), and a little more, as measured.
pub fn gemm_workspace() -> u64 {
    const BESIDES: u64 = 1 << 17;
    gemm_common::cache::CACHE_INFO[1].cache_bytes as u64 + BESIDES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_chunked_evenly_and_not_for_small_excesses() {
        assert_eq!(positions_at_once(8192, 128_256, LOGITS_AT_ONCE), 8192);
        assert_eq!(positions_at_once(16_384, 128_256, LOGITS_AT_ONCE), 16_384);
        assert_eq!(positions_at_once(65_536, 128_256, LOGITS_AT_ONCE), 8192);
        assert_eq!(
            positions_at_once(8192, 262_272, LOGITS_AT_ONCE),
            8192,
            "Gemma 3, whose padded vocabulary is over 2^18"
        );
        assert_eq!(positions_at_once(10, 7, 66), 10);
        assert_eq!(positions_at_once(10, 7, 60), 4, "three chunks of 4, 4 and 2 positions with 28 logits at most");
        assert_eq!(positions_at_once(10, 7, 1), 1);
        assert_eq!(positions_at_once(0, 7, 1), 1);
    }

    #[test]
    fn large_buffers_have_few_sizes() {
        assert_eq!(size_class(12_345_678), 12_345_678);
        let mib = |n: usize| n << 20;
        // All buffers of an 8B model at 8,192 tokens but the logits keep their sizes.
        for size in [32, 64, 96, 224, 448].map(mib) {
            assert_eq!(size_class(size), size);
        }
        assert_eq!(size_class(8192 * 128_256 * 2), mib(2048));
        let rows = (16_384..18_432).map(|rows| size_class(rows * 28_672 * 2));
        let sizes: std::collections::BTreeSet<usize> = rows.collect();
        assert_eq!(sizes.into_iter().collect::<Vec<_>>(), [896, 960, 1024].map(mib));
        for bytes in (LARGE..mib(5000)).step_by(7_654_321) {
            assert!(size_class(bytes) >= bytes && size_class(bytes) < bytes + bytes / 8);
        }
    }
}
