//! What other crates keep with a rank: one value of a type, made when it is first asked for, gone with the rank.

use std::any::Any;
use std::sync::Arc;

use parking_lot::Mutex;

/// What can be kept with a [`Rank`](crate::launch::Rank).
pub trait Attached: Any + Send + Sync {
    /// Called on the rank's thread when its program has returned without an error, before its peers take it as finished:
    /// it waits for what is under way.
    fn finish(&self);
}

/// The values of a rank.
#[derive(Clone, Default)]
pub(crate) struct Attachments(Arc<Mutex<Vec<Arc<dyn Attached>>>>);

impl Attachments {
    /// The value of type `T`.
    pub fn get<T: Attached + Default>(&self) -> Arc<T> {
        let mut all = self.0.lock();
        let mut known = all.iter().map(|value| value.clone() as Arc<dyn Any + Send + Sync>);
        if let Some(value) = known.find_map(|value| value.downcast().ok()) {
            return value;
        }
        let value = Arc::new(T::default());
        all.push(value.clone());
        value
    }

    /// Finishes them, in the order in which they were made.
    pub fn finish(&self) {
        // Outside the lock: a value may ask for another one.
        let all = self.0.lock().clone();
        all.iter().for_each(|value| value.finish());
    }
}
