//! Size classes of large allocations.

/// Tensors below this many bytes have buffers of their exact size.
const LARGE: usize = 32 << 20;

/// The size class of a tensor of `bytes`: rounded up to one of eight sizes between two powers of two.
///
/// CubeCL allocates buffers from pages as large as the largest one so far. With sizes that change from step to step,
/// such as those of experts' tokens, it would repeatedly switch to larger pages while the old ones are still in use,
/// and no gap in a page would fit the next buffer.
pub(crate) fn size_class(bytes: usize) -> usize {
    if bytes < LARGE { bytes } else { bytes.next_multiple_of(bytes.next_power_of_two() / 16) }
}

#[cfg(test)]
mod tests {
    use super::*;

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
