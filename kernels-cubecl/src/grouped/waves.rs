//! How many cubes a product has.
use std::cell::Cell;

thread_local! {
    /// Times as many as the device holds.
    static WAVES: Cell<u32> = const { Cell::new(1) };
}

/// Runs `work`, whose products on this thread have up to `waves` times as many cubes as the device holds. Each has a
/// fixed share of the tiles: one for which another kernel leaves no room waits with all of its share, and smaller
/// shares go where there is room. The bits are the same.
pub fn in_waves<T>(waves: u32, work: impl FnOnce() -> T) -> T {
    let before = WAVES.replace(waves.max(1));
    let result = work();
    WAVES.set(before);
    result
}

/// What [`in_waves`] asked for.
pub(super) fn wanted() -> u32 {
    WAVES.get()
}
