//! Sizes, places and the text of the kernels; their sums are checked on GPUs (`gpu_check collectives one-shot`).

use super::layout::{
    BLOCKS, CHUNK, HEADER, MARK, MEMBERS, PREFETCHERS, THREADS, blocks, limit, memory, prefetched, region, staged,
};
use super::{norm_ptx, ptx};

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

#[test]
fn sums_with_norms_have_a_kernel_without_gaps_for_each_type_and_number_of_vectors() {
    for (kind, words) in [4, 4, 8].into_iter().enumerate() {
        for vectors in 1..=norm_ptx::VECTORS {
            let module = norm_ptx::module((kind, vectors, false), 9);
            let count = |of: &str| module.matches(of).count();
            assert_eq!(count(&format!(".entry {}(", norm_ptx::NAME)), 1);
            assert!(!module.contains("{{"), "{module}");
            assert_eq!(count("{"), count("}"));
            // Three inputs and two outputs, 16 bytes at once; a unit of 8 bytes is two words with the number of the call.
            let halves = vectors * words / 4;
            assert_eq!([count("ld.global.v4.b32"), count("st.global.v4.b32")], [3 * halves, 2 * halves]);
            assert_eq!(count("ld.relaxed.sys.global.v2.u64"), vectors * words / 2);
            // All words of a poll are asked for before one is looked at: their latencies overlap.
            let [first, last] = ["POLL:", "xor.b32 %t, %t, %flag"].map(|at| module.find(at).expect("the kernel polls"));
            assert_eq!(module[first..last].matches("ld.relaxed.sys").count(), vectors * words / 2);
            let [prefetching, older] = [9, 8].map(|capability| norm_ptx::module((kind, vectors, false), capability));
            assert!(prefetching.contains("bulk.prefetch") && !older.contains("bulk"));
            // One is added to each number of the weight, and nothing else is different.
            let of_one_more = norm_ptx::module((kind, vectors, true), 9);
            let is_added = |line: &&str| line.ends_with(", 0f3f800000;");
            assert_eq!(of_one_more.lines().filter(is_added).count(), 8 * vectors);
            assert!(of_one_more.lines().filter(|line| !is_added(line)).eq(module.lines()));
            // The kernel waits once for its own threads, and nobody leaves before.
            assert_eq!([count("bar.sync"), count("ret;")], [1, 1]);
        }
    }
}

#[test]
fn no_more_is_prefetched_than_there_is_and_than_the_threads_ask_for() {
    // The fewest threads of a row are a warp.
    let all = PREFETCHERS * 32 * CHUNK;
    assert_eq!([0, 4095, 4096, 3 << 20, 1 << 30].map(prefetched), [0, 0, 4096, 3 << 20, all]);
}

#[test]
#[should_panic(expected = "5 vectors of a thread")]
fn longer_rows_have_no_kernel() {
    norm_ptx::module((0, norm_ptx::VECTORS + 1, false), 9);
}
