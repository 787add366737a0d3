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
}
