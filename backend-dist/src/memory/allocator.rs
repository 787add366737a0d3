//! The system's allocator, with the owner of a block noted in front of it.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{self, NonNull};

use super::counters::Tag;

/// Blocks of fewer bytes are not counted and have no note: tensors are larger, and everything else that is allocated
/// often is smaller.
pub const SMALLEST: usize = 512;

/// The system's allocator, which counts what each rank holds; see the [module](super). It takes no lock.
#[derive(Clone, Copy, Debug, Default)]
pub struct RankAllocator;

/// Where the note is: the machine word in front of the block.
const NOTE: usize = size_of::<usize>();

/// What the system is asked for: room for the note in front of the block, a multiple of the block's alignment so that
/// the block keeps it. `None` if that is more than a block can have.
fn with_note(layout: Layout) -> Option<(Layout, usize)> {
    let front = layout.align().max(16);
    let size = layout.size().checked_add(front)?;
    Some((Layout::from_size_align(size, front).ok()?, front))
}

/// Notes the current owner and counts the block.
///
/// # Safety
/// `base` is null or a block of `with_note(layout)`, which nobody else uses yet.
unsafe fn hand_out(base: *mut u8, front: usize, layout: Layout) -> *mut u8 {
    let Some(base) = NonNull::new(base) else { return ptr::null_mut() };
    let tag = Tag::current();
    tag.add(layout.size());
    // SAFETY: the block has `front` ≥ 16 bytes in front of the place that is handed out, which is aligned for a word.
    unsafe {
        let block = base.as_ptr().add(front);
        block.sub(NOTE).cast::<usize>().write(tag.0);
        block
    }
}

// SAFETY: every block is one of the system's allocator, whole or without its first `front` bytes. Which of the two
// follows from the size in the layout alone, and callers must hand back the layout that they allocated with. The part
// that is handed out has the size and the alignment asked for, and the note lies outside of it. Nothing here unwinds or
// allocates: the thread's tag is a constant-initialized `Cell` and the counters are statics.
unsafe impl GlobalAlloc for RankAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() < SMALLEST {
            // SAFETY: the caller's promise about `layout`.
            return unsafe { System.alloc(layout) };
        }
        let Some((larger, front)) = with_note(layout) else { return ptr::null_mut() };
        // SAFETY: `larger` is not empty.
        unsafe { hand_out(System.alloc(larger), front, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() < SMALLEST {
            // SAFETY: the caller's promise about `layout`.
            return unsafe { System.alloc_zeroed(layout) };
        }
        let Some((larger, front)) = with_note(layout) else { return ptr::null_mut() };
        // SAFETY: `larger` is not empty.
        unsafe { hand_out(System.alloc_zeroed(larger), front, layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() < SMALLEST {
            // SAFETY: a small block is the system's own.
            return unsafe { System.dealloc(block, layout) };
        }
        let (larger, front) = with_note(layout).expect("the block was allocated with this layout");
        // SAFETY: the block was handed out for this layout, so its note and the rest of the front lie before it.
        unsafe {
            Tag(block.sub(NOTE).cast::<usize>().read()).subtract(layout.size());
            System.dealloc(block.sub(front), larger);
        }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (small, stays_small) = (layout.size() < SMALLEST, new_size < SMALLEST);
        if small && stays_small {
            // SAFETY: a small block is the system's own; the rest is the caller's promise.
            return unsafe { System.realloc(block, layout, new_size) };
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
        // SAFETY: the block with its front is the system's, of `larger`, and so is what comes back, of the same
        // alignment; the note is among the bytes that move along. Where it fails, the old block stays as it is.
        unsafe {
            let tag = Tag(block.sub(NOTE).cast::<usize>().read());
            let base = System.realloc(block.sub(front), larger, new_larger.size());
            let Some(base) = NonNull::new(base) else { return ptr::null_mut() };
            match new_size >= layout.size() {
                true => tag.add(new_size - layout.size()),
                false => tag.subtract(layout.size() - new_size),
            }
            base.as_ptr().add(front)
        }
    }
}
