//! Errors of work on CubeCL's thread, for the launch that issued it.
//!
//! Work is issued without waiting, so its error comes later. The issuing thread panics with it at its next operation on
//! the GPU; until then nothing can read what was not written, because CubeCL holds those buffers for failed. An error
//! that comes after its launch has ended is dropped: the next launch of the process must not be blamed for it.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// Of threads that are of no launch: their errors are everybody's, and they see everybody's.
const NONE: u64 = 0;

thread_local! {
    static LAUNCH: Cell<u64> = const { Cell::new(NONE) };
}

/// Whether there are errors: every operation asks.
static ANY: AtomicBool = AtomicBool::new(false);
static PENDING: Mutex<PendingErrors> = Mutex::new(PendingErrors { under_way: BTreeSet::new(), errors: Vec::new() });

struct PendingErrors {
    under_way: BTreeSet<u64>,
    /// By GPU and launch the first error that no thread has panicked with yet.
    errors: Vec<(u16, u64, String)>,
}

fn pending() -> MutexGuard<'static, PendingErrors> {
    PENDING.lock()
}

/// A launch, from its beginning until it is dropped.
pub struct Launch(u64);

impl Launch {
    /// A new one.
    pub fn begin() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(NONE + 1);
        let launch = NEXT.fetch_add(1, Ordering::Relaxed);
        pending().under_way.insert(launch);
        Self(launch)
    }

    /// What this thread issues from now on belongs to the launch.
    pub fn enter(&self) {
        LAUNCH.set(self.0);
    }
}

/// The launch that a thread works for.
#[cfg(feature = "cuda")]
pub struct Entered(u64);

#[cfg(feature = "cuda")]
impl Entered {
    /// The one of the calling thread.
    pub fn of_this_thread() -> Self {
        Self(LAUNCH.get())
    }

    /// What this thread issues from now on belongs to it.
    pub fn enter(&self) {
        LAUNCH.set(self.0);
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        let mut pending = pending();
        pending.under_way.remove(&self.0);
        pending.errors.retain(|(_, launch, _)| *launch != self.0);
        ANY.store(!pending.errors.is_empty(), Ordering::Release);
    }
}

/// A callback that takes the error of what this thread issues on a GPU, for the next operation there.
pub fn noting(gpu: u16) -> impl FnOnce(String) + Send + 'static {
    let launch = LAUNCH.get();
    move |message| {
        let mut pending = pending();
        let counts = launch == NONE || pending.under_way.contains(&launch);
        if counts && pending.errors.iter().all(|(at, of, _)| (*at, *of) != (gpu, launch)) {
            pending.errors.push((gpu, launch, message));
            ANY.store(true, Ordering::Release);
        }
    }
}

/// # Panics
/// If earlier work of this thread's launch on the GPU failed; with its error.
pub fn check(gpu: u16) {
    if !ANY.load(Ordering::Acquire) {
        return;
    }
    let own = LAUNCH.get();
    let message = {
        let mut pending = pending();
        let ours = |launch: u64| launch == own || launch == NONE || own == NONE;
        let at = pending.errors.iter().position(|(at, launch, _)| *at == gpu && ours(*launch));
        let message = at.map(|at| pending.errors.swap_remove(at).2);
        ANY.store(!pending.errors.is_empty(), Ordering::Release);
        message
    };
    if let Some(message) = message {
        panic!("GPU {gpu}: {message}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::catch_unwind;
    use std::thread;

    // Of this test alone.
    const GPU: u16 = 60_000;

    fn seen() -> Option<String> {
        catch_unwind(|| check(GPU)).err().map(|panic| *panic.downcast::<String>().unwrap())
    }

    #[test]
    fn an_error_is_that_of_the_launch_which_issued_the_work() {
        let (first, other) = (Launch::begin(), Launch::begin());
        thread::scope(|scope| {
            scope.spawn(|| {
                first.enter();
                noting(GPU)("out of paper".into());
                noting(GPU)("the second one is dropped".into());
                other.enter();
                assert_eq!(seen(), None);
                first.enter();
                assert_eq!(seen(), Some(format!("GPU {GPU}: out of paper")));
                assert_eq!(seen(), None);
            });
        });
    }

    #[test]
    fn what_a_launch_leaves_behind_is_not_the_next_ones() {
        let late = thread::spawn(|| {
            let earlier = Launch::begin();
            earlier.enter();
            noting(GPU)("nobody has looked".into());
            noting(GPU)
        });
        let late = late.join().unwrap();
        let next = thread::spawn(|| {
            let next = Launch::begin();
            next.enter();
            assert_eq!(seen(), None);
            late("it came when all was over".into());
            seen()
        });
        assert_eq!(next.join().unwrap(), None);
    }

    #[test]
    fn errors_of_no_launch_are_everybodys() {
        let gpu = GPU + 1;
        noting(gpu)("outside".into());
        let inside = thread::spawn(move || {
            let launch = Launch::begin();
            launch.enter();
            catch_unwind(|| check(gpu)).is_err()
        });
        assert!(inside.join().unwrap());
    }
}
