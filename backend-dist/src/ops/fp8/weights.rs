//! Quantised weights, cached while the weights do not change.

use std::any::Any;
use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

thread_local! {
    /// Counts the changes of this rank's weights, once they are reported.
    static VERSION: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Reports a change of the weights of this thread's rank. From now on every change must be reported: until the next
/// call a weight is quantised once and the result, two bytes for each element, is cached.
///
/// Without a call weights are quantised whenever they are used, which suits weights that are gathered and released
/// (ZeRO 3).
pub fn weights_changed() {
    VERSION.set(Some(VERSION.get().map_or(0, |version| version + 1)));
}

/// Ends the caching that [`weights_changed`] began.
pub fn weights_may_change() {
    VERSION.set(None);
}

/// Whether quantised weights are cached.
pub(super) fn are_kept() -> bool {
    VERSION.get().is_some()
}

/// A value computed from a weight. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Cached(Arc<Mutex<Option<Version>>>);

/// A value computed from a version of the weights.
struct Version {
    version: u64,
    value: Box<dyn Any + Send>,
}

impl Cached {
    /// The value of the present weights.
    pub fn get<T: Clone + 'static>(&self) -> Option<T> {
        let kept = self.lock();
        let kept = kept.as_ref().filter(|kept| Some(kept.version) == VERSION.get())?;
        kept.value.downcast_ref::<T>().cloned()
    }

    /// Caches the value of the present weights, if caching is on.
    pub fn set<T: Clone + Send + 'static>(&self, value: &T) {
        *self.lock() = VERSION.get().map(|version| Version { version, value: Box::new(value.clone()) });
    }

    fn lock(&self) -> MutexGuard<'_, Option<Version>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
