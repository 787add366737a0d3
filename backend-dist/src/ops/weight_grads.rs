//! Weight gradients after the gradients of inputs: the two-part backward pass of a zero-bubble pipeline schedule (Qi et
//! al., "Zero Bubble Pipeline Parallelism", 2023).

use std::cell::RefCell;
use std::fmt;

use burn::backend::autodiff::grads::Gradients as AutodiffGradients;
use burn::tensor::Gradients;

use super::tape;

type Job = Box<dyn FnOnce(&mut AutodiffGradients) + Send>;

thread_local! {
    /// The weight gradients that the backward pass on this thread defers, within [`deferred`].
    static QUEUE: RefCell<Option<Vec<Job>>> = const { RefCell::new(None) };
}

/// Runs `backward` without the weight gradients of [`linear`](super::linear) and [`linear_with`](super::linear_with),
/// and returns them as deferred work. All other gradients are complete in the result of `backward`.
///
/// The deferred work holds each layer's input and output gradient. Weights that are not leaves of the graph are not
/// deferred, since other nodes wait for their gradients.
pub fn deferred<T>(backward: impl FnOnce() -> T) -> (T, Deferred) {
    let outer = QUEUE.replace(Some(Vec::new()));
    let restore = Restore(outer);
    let result = backward();
    let jobs = QUEUE.take().unwrap_or_default();
    drop(restore);
    (result, Deferred { jobs })
}

/// Restores the queue of the surrounding call, also when `backward` panics.
struct Restore(Option<Vec<Job>>);

impl Drop for Restore {
    fn drop(&mut self) {
        QUEUE.set(self.0.take());
    }
}

/// Weight gradients that are still to be computed.
#[must_use = "weights get no gradient unless this is run"]
pub struct Deferred {
    jobs: Vec<Job>,
}

impl Deferred {
    /// The weight gradients, in their own container. A weight that is used several times has their sum.
    ///
    /// With sequence parallelism the inputs are gathered again here: all ranks of the group must run it at the same
    /// point in the order of their collectives.
    pub fn run(self) -> Gradients {
        tape::collect(move |grads| self.jobs.into_iter().for_each(|job| job(grads)))
    }

    /// Number of weight gradients.
    pub fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether nothing was deferred.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }
}

impl fmt::Debug for Deferred {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "Deferred({} weight gradients)", self.jobs.len())
    }
}

/// Whether this is within [`deferred`].
#[cfg(feature = "cuda")]
pub(super) fn is_deferring() -> bool {
    QUEUE.with_borrow(Option::is_some)
}

/// Runs `job` now, or later within [`deferred`].
pub(super) fn run_or_defer(grads: &mut AutodiffGradients, job: impl FnOnce(&mut AutodiffGradients) + Send + 'static) {
    let now = QUEUE.with_borrow_mut(|queue| match queue {
        Some(jobs) => {
            jobs.push(Box::new(job));
            None
        }
        None => Some(job),
    });
    if let Some(job) = now {
        job(grads);
    }
}
