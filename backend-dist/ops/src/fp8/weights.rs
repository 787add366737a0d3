//! Quantised weights, cached while the weights do not change.

use std::any::Any;
use std::sync::Arc;

use parking_lot::Mutex;

use super::layers::WeightVersion;

/// A value computed from a weight. Clones share it.
#[derive(Clone)]
pub(super) struct Cached {
    version: WeightVersion,
    value: Arc<Mutex<Option<Version>>>,
}

/// A value computed from a version of the weights.
struct Version {
    version: u64,
    value: Box<dyn Any + Send>,
}

impl Cached {
    /// Nothing yet, of a weight of the model whose versions these are.
    pub fn new(version: &WeightVersion) -> Self {
        Self { version: version.clone(), value: Arc::default() }
    }

    /// Whether values are cached.
    pub fn is_on(&self) -> bool {
        self.version.get().is_some()
    }

    /// The value of the present weights.
    pub fn get<T: Clone + 'static>(&self) -> Option<T> {
        let kept = self.value.lock();
        let kept = kept.as_ref().filter(|kept| Some(kept.version) == self.version.get())?;
        kept.value.downcast_ref::<T>().cloned()
    }

    /// Caches the value of the present weights, if caching is on.
    pub fn set<T: Clone + Send + 'static>(&self, value: &T) {
        *self.value.lock() = self.version.get().map(|version| Version { version, value: Box::new(value.clone()) });
    }
}
