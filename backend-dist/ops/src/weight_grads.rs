//! Weight gradients after the gradients of inputs: the two-part backward pass of a zero-bubble pipeline schedule (Qi et
//! al., "Zero Bubble Pipeline Parallelism", 2023).

use std::fmt;
use std::sync::Arc;

use burn::backend::autodiff::grads::Gradients as AutodiffGradients;
use burn::tensor::Gradients;
use parking_lot::{Mutex, MutexGuard};

use super::tape;

type Job = Box<dyn FnOnce(&mut AutodiffGradients) + Send>;

/// Where the weight gradients of a pass wait while its backward pass defers them. Clones share it; by default nothing
/// can be deferred.
#[derive(Clone, Default)]
pub struct Deferral(Option<Arc<Mutex<Option<Vec<Job>>>>>);

impl Deferral {
    /// Of a pass whose weight gradients can be deferred.
    pub fn possible() -> Self {
        Self(Some(Arc::default()))
    }

    /// Runs `backward` without the weight gradients of the layers of this pass, and returns them as deferred work. All
    /// other gradients are complete in the result of `backward`.
    ///
    /// The deferred work holds each layer's input and output gradient. Weights that are not leaves of the graph are not
    /// deferred, since other nodes wait for their gradients.
    pub fn deferred<T>(&self, backward: impl FnOnce() -> T) -> (T, Deferred) {
        let restore = Restore(self, self.replace(Some(Vec::new())));
        let result = backward();
        let jobs = self.replace(None).unwrap_or_default();
        drop(restore);
        (result, Deferred { jobs })
    }

    /// For the gradient of a node of this order: of a leaf it can be deferred, for others nodes wait.
    pub(super) fn of(&self, order: usize) -> Self {
        if order == 0 { self.clone() } else { Self::default() }
    }

    /// Whether this is within [`deferred`](Self::deferred).
    pub(super) fn is_deferring(&self) -> bool {
        self.0.as_ref().is_some_and(|queue| lock(queue).is_some())
    }

    /// Runs `job` now, or later within [`deferred`](Self::deferred).
    pub(super) fn run(&self, grads: &mut AutodiffGradients, job: impl FnOnce(&mut AutodiffGradients) + Send + 'static) {
        if let Some(jobs) = self.0.as_ref().map(lock).as_deref_mut().and_then(Option::as_mut) {
            return jobs.push(Box::new(job));
        }
        job(grads);
    }

    fn replace(&self, jobs: Option<Vec<Job>>) -> Option<Vec<Job>> {
        self.0.as_ref().and_then(|queue| std::mem::replace(&mut *lock(queue), jobs))
    }
}

fn lock(queue: &Arc<Mutex<Option<Vec<Job>>>>) -> MutexGuard<'_, Option<Vec<Job>>> {
    queue.lock()
}

impl fmt::Debug for Deferral {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("Deferral")
    }
}

/// Restores the queue of the surrounding call, also when `backward` panics.
struct Restore<'a>(&'a Deferral, Option<Vec<Job>>);

impl Drop for Restore<'_> {
    fn drop(&mut self) {
        self.0.replace(self.1.take());
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
