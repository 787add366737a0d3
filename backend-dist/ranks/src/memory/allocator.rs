//! An allocator, with the owner of a block stored before it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{self, NonNull};

use super::counters::Tag;

/// Smaller blocks are neither counted nor tagged: tensors are larger, and most other frequent allocations are smaller.
pub const SMALLEST: usize = 512;

/// An allocator, by default the system's, that counts the bytes of each rank; see the [module](super). It takes no lock.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankAllocator<A = System>(pub A);

/// Offset of the tag: the machine word before the block.
const NOTE: usize = size_of::<usize>();

/// The layout requested from the allocator below: with space for the tag before the block, a multiple of the block's alignment,
/// which is preserved. `None` if that exceeds the largest block.
fn with_note(layout: Layout) -> Option<(Layout, usize)> {
    let front = layout.align().max(16);
    let size = layout.size().checked_add(front)?;
    Some((Layout::from_size_align(size, front).ok()?, front))
}

/// Tags the block with the current owner and counts it.
///
/// # Safety
/// `base` is null or a block of `with_note(layout)` that is not yet used.
unsafe fn hand_out(base: *mut u8, front: usize, layout: Layout) -> *mut u8 {
    let Some(base) = NonNull::new(base) else { return ptr::null_mut() };
    let tag = Tag::current();
    tag.add(layout.size());
    // SAFETY: the block has `front` ≥ 16 bytes before the returned address, which is aligned for a word.
    unsafe {
        let block = base.as_ptr().add(front);
        block.sub(NOTE).cast::<usize>().write(tag.0);
        block
    }
}

// SAFETY: every block is one of the allocator below, whole or without its first `front` bytes. Which of the two
// follows from the size in the layout alone, and callers must return the layout that they allocated with. The returned
// part has the requested size and alignment, and the tag is outside of it. Nothing here unwinds or allocates: the
// thread's tag is a constant-initialized `Cell` and the counters are statics.
unsafe impl<A: GlobalAlloc> GlobalAlloc for RankAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() < SMALLEST {
            // SAFETY: the caller's promise about `layout`.
            return unsafe { self.0.alloc(layout) };
        }
        let Some((larger, front)) = with_note(layout) else { return ptr::null_mut() };
        // SAFETY: `larger` is not empty.
        unsafe { hand_out(self.0.alloc(larger), front, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() < SMALLEST {
            // SAFETY: the caller's promise about `layout`.
            return unsafe { self.0.alloc_zeroed(layout) };
        }
        let Some((larger, front)) = with_note(layout) else { return ptr::null_mut() };
        // SAFETY: `larger` is not empty.
        unsafe { hand_out(self.0.alloc_zeroed(larger), front, layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() < SMALLEST {
            // SAFETY: a small block is of the allocator below.
            return unsafe { self.0.dealloc(block, layout) };
        }
        let (larger, front) = with_note(layout).expect("the block was allocated with this layout");
        // SAFETY: the block was returned for this layout, so its tag and the rest of the front are before it.
        unsafe {
            Tag(block.sub(NOTE).cast::<usize>().read()).subtract(layout.size());
            self.0.dealloc(block.sub(front), larger);
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (small, stays_small) = (layout.size() < SMALLEST, new_size < SMALLEST);
        if small && stays_small {
            // SAFETY: a small block is of the allocator below; the rest is the caller's promise.
            return unsafe { self.0.realloc(block, layout, new_size) };
        }
        let Ok(new_layout) = Layout::from_size_align(new_size, layout.align()) else { return ptr::null_mut() };
        if small != stays_small {
            // SAFETY: both blocks are valid for the smaller of the two sizes and are different blocks.
            return unsafe {
                let new = self.alloc(new_layout);
                if !new.is_null() {
                    ptr::copy_nonoverlapping(block, new, layout.size().min(new_size));
                    self.dealloc(block, layout);
                }
                new
            };
        }
        let Some((larger, front)) = with_note(layout) else { return ptr::null_mut() };
        let Some((new_larger, _)) = with_note(new_layout) else { return ptr::null_mut() };
        // SAFETY: the block with its front is of the allocator below, of `larger`, and so is the result, with the same alignment;
        // the tag is among the bytes that are moved. If it fails, the old block is unchanged.
        unsafe {
            let tag = Tag(block.sub(NOTE).cast::<usize>().read());
            let base = self.0.realloc(block.sub(front), larger, new_larger.size());
            let Some(base) = NonNull::new(base) else { return ptr::null_mut() };
            match new_size >= layout.size() {
                true => tag.add(new_size - layout.size()),
                false => tag.subtract(layout.size() - new_size),
            }
            base.as_ptr().add(front)
        }
    }
}
