//! Quantised weights that are kept while the weights do not change.

use std::any::Any;
use std::cell::Cell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

thread_local! {
    /// Counts the changes of this rank's weights, once somebody reports them.
    static VERSION: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The weights of this thread's rank have changed, and from now on every change will be reported by this function:
/// until the next call a weight is quantised once and the result, two bytes for each element, is kept.
///
/// Without a call weights are quantised whenever they are used, which is right for weights that come and go (ZeRO 3).
pub fn weights_changed() {
    VERSION.set(Some(VERSION.get().map_or(0, |version| version + 1)));
}

/// Ends what [`weights_changed`] began.
pub fn weights_may_change() {
    VERSION.set(None);
}

/// Whether quantised weights are kept.
pub(super) fn are_kept() -> bool {
    VERSION.get().is_some()
}

/// What was made of a weight. Clones are the same place.
#[derive(Clone, Default)]
pub(super) struct Cached(Arc<Mutex<Option<Version>>>);

/// What was made of a version of the weights.
struct Version {
    version: u64,
    value: Box<dyn Any + Send>,
}

impl Cached {
    /// What was made of the present weights.
    pub fn get<T: Clone + 'static>(&self) -> Option<T> {
        let kept = self.lock();
        let kept = kept.as_ref().filter(|kept| Some(kept.version) == VERSION.get())?;
        kept.value.downcast_ref::<T>().cloned()
    }

    /// Keeps what was made of the present weights, if such are kept.
    pub fn set<T: Clone + Send + 'static>(&self, value: &T) {
        *self.lock() = VERSION.get().map(|version| Version { version, value: Box::new(value.clone()) });
    }

    fn lock(&self) -> MutexGuard<'_, Option<Version>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
