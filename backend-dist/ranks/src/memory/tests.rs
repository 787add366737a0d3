//! The allocator called directly, with ranks that no other test uses.

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;

use super::*;

/// Runs `f` on a separate thread of `rank`.
fn on_rank<T: Send>(rank: usize, f: impl FnOnce() -> T + Send) -> T {
    let run = || {
        set_rank(Some(rank));
        f()
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

#[test]
fn blocks_are_aligned_whole_and_counted_at_their_size() {
    on_rank(900, || {
        for align in [1, 2, 8, 16, 32, 64, 4096] {
            for size in [1, 16, 511, 512, 513, 4096, 100_000] {
                let layout = layout(size, align);
                let counted = if size < SMALLEST { 0 } else { size as u64 };
                // SAFETY: the layouts are not empty; the block is written within its size and freed once.
                unsafe {
                    let block = RankAllocator(std::alloc::System).alloc(layout);
                    assert!(!block.is_null() && block.addr().is_multiple_of(align), "{layout:?}");
                    block.write_bytes(0xa5, size);
                    assert_eq!(live(900), counted);
                    RankAllocator(std::alloc::System).dealloc(block, layout);
                    let zeroed = RankAllocator(std::alloc::System).alloc_zeroed(layout);
                    assert!(zeroed.addr().is_multiple_of(align));
                    assert!(std::slice::from_raw_parts(zeroed, size).iter().all(|&byte| byte == 0), "{layout:?}");
                    RankAllocator(std::alloc::System).dealloc(zeroed, layout);
                }
                assert_eq!(live(900), 0);
            }
        }
    });
    assert!(is_counting());
}

#[test]
fn a_block_that_grows_and_shrinks_keeps_bytes_and_alignment() {
    on_rank(901, || {
        for align in [1, 16, 128] {
            // Small, across the limit, larger, smaller, back across the limit, and small.
            let sizes = [100, 200, 600, 70_000, 1000, 512, 511, 40];
            // SAFETY: the block always has the last size, and is read and written within it.
            unsafe {
                let mut block = RankAllocator(std::alloc::System).alloc(layout(sizes[0], align));
                (0..sizes[0]).for_each(|index| block.add(index).write(index as u8));
                for pair in sizes.windows(2) {
                    block = RankAllocator(std::alloc::System).realloc(block, layout(pair[0], align), pair[1]);
                    assert!(!block.is_null() && block.addr().is_multiple_of(align));
                    let kept = sizes[0].min(pair[1]);
                    assert!((0..kept).all(|index| *block.add(index) == index as u8), "{pair:?} at {align}");
                    assert_eq!(live(901), if pair[1] < SMALLEST { 0 } else { pair[1] as u64 });
                }
                RankAllocator(std::alloc::System).dealloc(block, layout(40, align));
            }
        }
    });
    assert_eq!((live(901), peak(901)), (0, 70_000));
}

#[test]
fn a_block_belongs_to_the_rank_that_allocated_it() {
    let layout = layout(1000, 8);
    // SAFETY: freed once below, with its layout; an address may cross threads.
    let block = on_rank(902, || unsafe { RankAllocator(std::alloc::System).alloc(layout) }.expose_provenance());
    on_rank(903, || {
        let block = std::ptr::with_exposed_provenance_mut(block);
        assert_eq!((live(902), live(903)), (1000, 0));
        // SAFETY: as above; a larger block keeps its owner.
        unsafe {
            let block = RankAllocator(std::alloc::System).realloc(block, layout, 3000);
            assert_eq!((live(902), live(903)), (3000, 0));
            RankAllocator(std::alloc::System).dealloc(block, Layout::from_size_align(3000, 8).unwrap());
        }
    });
    assert_eq!((live(902), peak(902), peak(903)), (0, 3000, 0));
    reset_peak(902);
    assert_eq!(peak(902), 0);
}

#[test]
fn what_ranks_hold_together_is_nobodys() {
    let size = layout(2048, 16);
    on_rank(904, || {
        let allocate = || {
            // SAFETY: not empty.
            unsafe { RankAllocator(std::alloc::System).alloc(size) }
        };
        let blocks = [allocate(), without_rank(allocate), allocate()];
        assert_eq!(live(904), 2 * 2048);
        for block in blocks {
            // SAFETY: each was allocated above with this layout.
            unsafe { RankAllocator(std::alloc::System).dealloc(block, size) };
        }
        assert_eq!((live(904), peak(904)), (0, 2 * 2048));
    });
}

#[test]
fn what_cannot_be_allocated_is_refused_and_not_counted() {
    on_rank(905, || {
        let huge = isize::MAX as usize - 64;
        // SAFETY: the layouts are not empty; the block is freed once.
        unsafe {
            // The optimizer may take an allocation for done that is only compared with null.
            assert!(black_box(RankAllocator(std::alloc::System).alloc(layout(huge, 1))).is_null());
            assert!(black_box(RankAllocator(std::alloc::System).alloc(layout(huge, 64))).is_null());
            let small = layout(1000, 8);
            let block = RankAllocator(std::alloc::System).alloc(small);
            assert!(black_box(RankAllocator(std::alloc::System).realloc(block, small, huge)).is_null());
            assert_eq!(live(905), 1000);
            RankAllocator(std::alloc::System).dealloc(block, small);
        }
    });
    assert_eq!(live(905), 0);
}
