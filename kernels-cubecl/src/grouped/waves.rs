//! The number of cubes of a grouped GEMM.
use std::cell::Cell;

thread_local! {
    /// As a multiple of the cubes that fit on the device.
    static WAVES: Cell<u32> = const { Cell::new(1) };
}

/// Runs `work`, whose grouped GEMMs on this thread get up to `waves` times as many cubes as fit on the device. Tiles
/// are assigned to cubes statically: a cube that finds no free SM, because another kernel runs there, delays all of its
/// tiles. Smaller cubes balance that. The bits are the same.
pub fn in_waves<T>(waves: u32, work: impl FnOnce() -> T) -> T {
    let before = WAVES.replace(waves.max(1));
    let result = work();
    WAVES.set(before);
    result
}

/// The `waves` of [`in_waves`].
pub(super) fn current() -> u32 {
    WAVES.get()
}
