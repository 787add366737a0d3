//! What operations hand each other next to the autograd graph. A node of Burn's graph has one output, and passes through
//! Burn's dispatch without the type of its backend, so further values wait here without their type.

use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

type Values = VecDeque<Box<dyn Any + Send>>;

/// Values that one operation leaves for another, taken in the order in which they were put. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Stash(Arc<Mutex<Values>>);

impl Stash {
    /// Leaves a value.
    pub fn put<T: Send + 'static>(&self, value: T) {
        self.0.lock().push_back(Box::new(value));
    }

    /// The next value, if there is one and it has this type.
    pub fn take<T: 'static>(&self) -> Option<T> {
        let value = self.0.lock().pop_front()?;
        value.downcast().ok().map(|value| *value)
    }

    /// Number of values that nobody has taken.
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }
}

impl fmt::Debug for Stash {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Stash({})", self.len())
    }
}

/// Counts missed hand-overs: values that an operation left and the other did not get. Results are the same, but the
/// other operation has computed the value again or summed gradients in a pass of its own. By default nothing is counted.
#[derive(Clone, Debug, Default)]
pub struct HandOvers(Option<Arc<AtomicUsize>>);

impl HandOvers {
    /// A counter at zero.
    pub fn counted() -> Self {
        Self(Some(Arc::default()))
    }

    /// Missed hand-overs so far.
    pub fn missed(&self) -> usize {
        self.0.as_ref().map_or(0, |count| count.load(Ordering::Relaxed))
    }

    /// Counts a miss.
    pub(super) fn miss(&self) {
        if let Some(count) = &self.0 {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_out_in_their_order_and_with_their_type() {
        let (stash, counter) = (Stash::default(), HandOvers::counted());
        stash.put(1u8);
        stash.clone().put("two");
        assert_eq!((stash.len(), stash.take::<u8>()), (2, Some(1)));
        assert_eq!(stash.take::<u8>(), None, "another type");
        assert_eq!((stash.len(), stash.take::<u8>()), (0, None));
        counter.clone().miss();
        HandOvers::default().miss();
        assert_eq!((counter.missed(), HandOvers::default().missed()), (1, 0));
    }
}
