//! Sizes, places and the text of the kernels; their sums are checked on GPUs (`collective_check`, part `one-shot`).

use super::layout::{BLOCKS, HEADER, MARK, MEMBERS, THREADS, blocks, limit, memory, region, staged};
use super::ptx;

#[test]
fn regions_lie_apart_within_the_memory_and_hold_the_largest_tensor() {
    for size in 2..=MEMBERS {
        let regions: Vec<_> =
            (0..2).flat_map(|call| (0..size).map(move |from| staged(size, call, from, limit(size)))).collect();
        assert_eq!((regions[0].start, regions.last().unwrap().end), (HEADER, memory(size)));
        assert!(regions.windows(2).all(|pair| pair[0].end == pair[1].start), "{size}: {regions:?}");
        // A thread stores 16 bytes at once.
        assert!(regions.iter().all(|region| region.start % 16 == 0), "{size}: {regions:?}");
        const { assert!(MARK + 4 <= HEADER) };
        // Calls after the next use the same slot, whatever their sizes.
        assert_eq!(staged(size, 7, 1, 1).start, staged(size, 5, 1, limit(size)).start);
        assert_ne!(staged(size, 7, 1, 1).start, staged(size, 6, 1, 1).start);
    }
    assert_eq!((limit(2), limit(8), region(2)), (256 << 10, 64 << 10, 32 << 10));
}

#[test]
fn small_tensors_have_a_thread_for_each_unit() {
    assert_eq!((blocks(1), blocks(8 * THREADS), blocks(8 * THREADS + 1)), (1, 1, 2));
    // A hidden size of 4,096 in bf16.
    assert_eq!(blocks(8192), 4);
    assert_eq!(blocks(limit(2)), BLOCKS);
}

#[test]
fn every_type_has_a_kernel_without_gaps() {
    let module = ptx::module();
    for name in ptx::names() {
        assert_eq!(module.matches(&format!(".entry {name}(")).count(), 1, "{name}");
    }
    // What a format string leaves behind.
    assert!(!module.contains("{{") && !module.contains("round"), "{module}");
    assert_eq!(module.matches('{').count(), module.matches('}').count());
    // Data and number of a call are one access: two of 64 bits, each whole.
    assert_eq!(module.matches("ld.relaxed.sys.global.v2.u64").count(), ptx::names().len());
}
