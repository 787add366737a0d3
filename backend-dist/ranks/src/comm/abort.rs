//! The end of a communicator by force: who may be inside it meanwhile, and when its memory is freed.
//!
//! NCCL's `ncclCommAbort` sets the flags that end kernels and calls which wait for a peer, and then frees the communicator
//! (`commReclaim` in its src/init.cc): the last rank of a process frees those of all its ranks. No lock keeps that from a
//! thread that is still on its way out of a call. So the two are apart here, and memory is freed by one thread of the
//! process at a time, after the calls have returned.
//!
//! That is not yet alone: `commDestroySync` of each rank lets a service thread of NCCL free that rank's buffers at once
//! (`ncclProxyFreeConnections` in src/proxy.cc), before the kernels of the next rank are waited for, and the driver does it
//! next to whatever ranks on their way out ask of it. So it waits too until the ranks have stopped and the stream is idle.

use parking_lot::Mutex;
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a call may take to return once its flags are set, and the freeing of others to end.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);

/// Most lines that a process says about aborts.
const LINES: usize = 20;

/// What the end of a communicator consists of.
pub(crate) trait Abort {
    /// Ends its kernels and the calls that wait in it; returns at once.
    fn raise(&self) -> Result<(), String>;

    /// Who is in which call, if anybody is. Once it is `None`, no further call begins.
    fn inside(&self) -> Option<String>;

    /// Whether ranks of its run, or its GPU, still do what may concern it.
    fn is_in_use(&self) -> bool;

    /// Frees it.
    fn free(&self) -> Result<(), String>;
}

/// Ends `communicator`, which it calls `name`: no call begins any more. Waits up to `limit` for calls that run and all other
/// use, and as long for its turn; what is not free then stays until the process exits, and is said. Whether it is free.
pub(crate) fn abort(communicator: &impl Abort, name: &str, limit: Duration) -> bool {
    static TURN: Mutex<()> = Mutex::new(());
    let start = Instant::now();
    if let Err(error) = communicator.raise() {
        return left(name, &error);
    }
    let mut is_said = false;
    while let Some(who) = communicator.inside() {
        if start.elapsed() > limit {
            return left(name, &format!("{who} has not returned in {} s", limit.as_secs()));
        }
        if !is_said {
            is_said = true;
            say(&format!("NCCL on {name} is aborted with {who}"));
        }
        sleep(Duration::from_millis(10));
    }
    while communicator.is_in_use() {
        if start.elapsed() > limit {
            return left(name, &format!("its ranks or its GPU have not stopped in {} s", limit.as_secs()));
        }
        sleep(Duration::from_millis(5));
    }
    let Some(_turn) = TURN.try_lock_for(limit) else {
        return left(name, &format!("another one has not been freed in {} s", limit.as_secs()));
    };
    communicator.free().map_or_else(|error| left(name, &error), |()| true)
}

fn left(name: &str, why: &str) -> bool {
    say(&format!("NCCL's memory for {name} is not freed: {why}"));
    false
}

fn say(line: &str) {
    static SAID: AtomicUsize = AtomicUsize::new(0);
    if SAID.fetch_add(1, Ordering::Relaxed) < LINES {
        let _ = writeln!(io::stderr(), "{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use std::thread;

    /// A communicator with a call that returns so long after the flags are set.
    struct Fake<'a> {
        returns_after: Duration,
        raised: Mutex<Option<Instant>>,
        is_in_use: AtomicBool,
        /// Shared by all of a process.
        is_freeing: &'a AtomicBool,
        is_free: AtomicBool,
    }

    impl<'a> Fake<'a> {
        fn new(returns_after: Duration, is_freeing: &'a AtomicBool) -> Self {
            let [is_in_use, is_free] = [(); 2].map(|()| AtomicBool::new(false));
            Self { returns_after, raised: Mutex::new(None), is_in_use, is_freeing, is_free }
        }
    }

    impl Abort for Fake<'_> {
        fn raise(&self) -> Result<(), String> {
            *self.raised.lock() = Some(Instant::now());
            Ok(())
        }

        fn inside(&self) -> Option<String> {
            let raised = self.raised.lock().expect("a call that waits for a peer returns only once the flags are set");
            (raised.elapsed() < self.returns_after).then(|| "rank 0 in all-reduce(sum)".to_string())
        }

        fn is_in_use(&self) -> bool {
            self.is_in_use.load(Ordering::Acquire)
        }

        fn free(&self) -> Result<(), String> {
            assert_eq!(self.inside(), None, "nothing is freed under a thread that is in a call");
            assert!(!self.is_in_use(), "nothing is freed that ranks or the GPU use");
            assert!(!self.is_freeing.swap(true, Ordering::AcqRel), "one is freed at a time");
            sleep(Duration::from_millis(20));
            self.is_freeing.store(false, Ordering::Release);
            assert!(!self.is_free.swap(true, Ordering::AcqRel), "it is freed once");
            Ok(())
        }
    }

    #[test]
    fn communicators_are_freed_one_by_one_after_their_calls() {
        let is_freeing = AtomicBool::new(false);
        let all: Vec<_> = (0..6).map(|i| Fake::new(Duration::from_millis(15 * i), &is_freeing)).collect();
        thread::scope(|scope| {
            for communicator in &all {
                scope.spawn(move || assert!(abort(communicator, "tp[0, 1]", LIMIT)));
            }
        });
        assert!(all.iter().all(|communicator| communicator.is_free.load(Ordering::Acquire)));
    }

    #[test]
    fn a_communicator_whose_call_does_not_return_is_left_and_does_not_hold_up_others() {
        let is_freeing = AtomicBool::new(false);
        let [stuck, other] = [Duration::MAX, Duration::ZERO].map(|after| Fake::new(after, &is_freeing));
        thread::scope(|scope| {
            let left = scope.spawn(|| abort(&stuck, "tp[0, 1]", Duration::from_millis(400)));
            assert!(abort(&other, "dp[0, 1]", LIMIT) && !left.is_finished());
            assert!(!left.join().unwrap());
        });
        assert!(!stuck.is_free.load(Ordering::Acquire));
    }

    #[test]
    fn nothing_is_freed_before_ranks_and_gpus_have_stopped() {
        let is_freeing = AtomicBool::new(false);
        let [used, stuck] = [(); 2].map(|()| Fake::new(Duration::ZERO, &is_freeing));
        [&used, &stuck].into_iter().for_each(|fake| fake.is_in_use.store(true, Ordering::Release));
        thread::scope(|scope| {
            let ended = scope.spawn(|| abort(&used, "tp[0, 1]", LIMIT));
            assert!(!abort(&stuck, "dp[0, 1]", Duration::from_millis(200)));
            assert!(!ended.is_finished() && !used.is_free.load(Ordering::Acquire));
            used.is_in_use.store(false, Ordering::Release);
            assert!(ended.join().unwrap());
        });
        assert!(used.is_free.load(Ordering::Acquire) && !stuck.is_free.load(Ordering::Acquire));
    }
}
