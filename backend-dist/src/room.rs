//! How large the buffers of large tensors are.

/// Tensors below this many bytes have buffers of their own size.
const LARGE: usize = 32 << 20;

/// Bytes of the buffer for a tensor of `bytes`: of eight sizes between two powers of two the next one.
///
/// CubeCL cuts buffers from pages as large as the largest one so far. Where sizes change from step to step, as those of
/// experts' rows do, it would go over to larger pages again and again while the old ones are still in use, and no hole
/// in a page would fit what comes next.
pub(crate) fn room(bytes: usize) -> usize {
    if bytes < LARGE { bytes } else { bytes.next_multiple_of(bytes.next_power_of_two() / 16) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_buffers_have_few_sizes() {
        assert_eq!(room(12_345_678), 12_345_678);
        let mib = |n: usize| n << 20;
        // Of an 8B model at 8,192 tokens all but the logits are as they were.
        for size in [32, 64, 96, 224, 448].map(mib) {
            assert_eq!(room(size), size);
        }
        assert_eq!(room(8192 * 128_256 * 2), mib(2048));
        let rows = (16_384..18_432).map(|rows| room(rows * 28_672 * 2));
        let sizes: std::collections::BTreeSet<usize> = rows.collect();
        assert_eq!(sizes.into_iter().collect::<Vec<_>>(), [896, 960, 1024].map(mib));
        for bytes in (LARGE..mib(5000)).step_by(7_654_321) {
            assert!(room(bytes) >= bytes && room(bytes) < bytes + bytes / 8);
        }
    }
}
