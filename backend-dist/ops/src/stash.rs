//! What operations hand each other next to the autograd graph. A node of Burn's graph has one output, and passes through
//! Burn's dispatch without the type of its backend, so further values wait here without their type.

use std::any::{Any, type_name};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Values that one operation leaves for another, taken in the order in which they were put. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Stash(Arc<Shared>);

#[derive(Default)]
struct Shared {
    values: Mutex<VecDeque<Value>>,
    hand_overs: HandOvers,
}

struct Value {
    of: &'static str,
    value: Box<dyn Any + Send>,
}

impl Stash {
    /// Values that are missed if nobody has taken them when the last clone is dropped.
    pub fn counted(hand_overs: &HandOvers) -> Self {
        Self(Arc::new(Shared { values: Mutex::default(), hand_overs: hand_overs.clone() }))
    }

    /// Leaves a value.
    pub fn put<T: Send + 'static>(&self, value: T) {
        self.0.values.lock().push_back(Value { of: type_name::<T>(), value: Box::new(value) });
    }

    /// The next value, if there is one.
    ///
    /// # Panics
    /// If it has another type: the two operations do not belong together.
    pub fn take<T: 'static>(&self) -> Option<T> {
        let Value { of, value } = self.0.values.lock().pop_front()?;
        let value =
            value.downcast().unwrap_or_else(|_| panic!("a {of} was left where a {} is taken", type_name::<T>()));
        Some(*value)
    }

    /// Number of values that nobody has taken.
    pub fn len(&self) -> usize {
        self.0.values.lock().len()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.values.get_mut().iter().for_each(|_| self.hand_overs.miss());
    }
}

impl fmt::Debug for Stash {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Stash({})", self.len())
    }
}

/// Counts missed hand-overs: values that an operation left and the other did not get. The other has computed the value again
/// or summed gradients in a pass of its own; of a [`SharedInput`](super::SharedInput) a gradient is lost. By default nothing
/// is counted.
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
        let counter = HandOvers::counted();
        let stash = Stash::counted(&counter);
        stash.put(1u8);
        stash.clone().put("two");
        assert_eq!((stash.len(), stash.take::<u8>()), (2, Some(1)));
        stash.put(3u8);
        assert_eq!((stash.take::<&str>(), stash.take(), stash.take::<u8>()), (Some("two"), Some(3u8), None));
        drop(stash);
        assert_eq!(counter.missed(), 0);
    }

    #[test]
    #[should_panic = "a u8 was left where a &str is taken"]
    fn another_type_is_refused() {
        let stash = Stash::default();
        stash.put(1u8);
        stash.take::<&str>();
    }

    #[test]
    fn what_nobody_takes_is_counted() {
        let counter = HandOvers::counted();
        let stash = Stash::counted(&counter);
        (1..4).for_each(|value| stash.put(value));
        let clone = stash.clone();
        drop(stash);
        assert_eq!((clone.take(), counter.missed()), (Some(1), 0));
        drop(clone);
        assert_eq!(counter.missed(), 2);
        counter.clone().miss();
        HandOvers::default().miss();
        assert_eq!((counter.missed(), HandOvers::default().missed()), (3, 0));
    }
}
