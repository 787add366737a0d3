//! Quantised weights that are kept while the weights do not change.

use std::cell::Cell;

thread_local! {
    /// Counts the changes of this rank's weights, once somebody reports them.
    static VERSION: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The weights of this thread's rank have changed, and from now on every change will be reported by this function: until
/// the next call a weight is quantised once and the result, two bytes for each element, is kept.
///
/// Without a call weights are quantised whenever they are used, which is right for weights that come and go (ZeRO 3).
pub fn weights_changed() {
    VERSION.set(Some(VERSION.get().map_or(0, |version| version + 1)));
}

/// Ends what [`weights_changed`] began.
pub fn weights_may_change() {
    VERSION.set(None);
}

pub(super) fn version() -> Option<u64> {
    VERSION.get()
}
