//! How requests come to the first rank.

use parking_lot::{Mutex, MutexGuard};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use thiserror::Error;

use super::request::{Event, Request};

/// Hands requests to the ranks; any number of threads may have one.
#[derive(Clone, Debug)]
pub struct Requests {
    sender: Sender<Message>,
    statistics: Arc<Mutex<Statistics>>,
}

/// Where the first rank takes them from.
#[derive(Debug)]
pub struct Queue {
    pub(super) receiver: Receiver<Message>,
    pub(super) statistics: Arc<Mutex<Statistics>>,
}

/// What happens to the events of a request: a break says that nobody wants more of them.
pub(super) type OnEvent = Box<dyn FnMut(Event) -> ControlFlow<()> + Send>;

pub(super) enum Message {
    Request(Box<Submitted>),
    Finish,
    Stop,
}

/// A request with who asked for it.
pub(super) struct Submitted {
    pub request: Request,
    pub on_event: OnEvent,
    pub wanted: Wanted,
}

/// Whether somebody wants more of a sequence, as who asked for it says and the ranks read.
#[derive(Clone, Debug, Default)]
pub(super) struct Wanted(Arc<AtomicU8>);

impl Wanted {
    const CANCELLED: u8 = 1;
    const COMPLETE: u8 = 2;

    /// Whether it is complete or only cancelled, if nobody wants more.
    pub fn ended(&self) -> Option<Ended> {
        match self.0.load(Ordering::Relaxed) {
            Self::COMPLETE => Some(Ended::Complete),
            Self::CANCELLED => Some(Ended::Cancelled),
            _ => None,
        }
    }
}

/// Why nobody wants more of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Complete,
    Cancelled,
}

/// A request lives as long as this: when it is dropped, the sequence ends and its blocks are free.
#[derive(Debug)]
#[must_use]
pub struct Ticket {
    wanted: Wanted,
}

impl Ticket {
    /// The text is whole, though no token has ended it: a stop string did. The sequence counts as stopped.
    pub fn complete(self) {
        self.wanted.0.fetch_max(Wanted::COMPLETE, Ordering::Relaxed);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.wanted.0.fetch_max(Wanted::CANCELLED, Ordering::Relaxed);
    }
}

/// The ranks take no more requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the server has stopped")]
pub struct Stopped;

/// What the ranks have done and do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Sequences that run.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Blocks of the cache that sequences have.
    pub used_blocks: usize,
    /// Blocks of the cache.
    pub num_blocks: usize,
    /// Tokens of the prompts that were read, or were in the cache.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were looked for in the cache: none of those whose log-probabilities are asked for.
    pub prefix_cache_queries: u64,
    /// Those of them that were there, and were not read.
    pub prefix_cache_hits: u64,
    /// New tokens.
    pub generation_tokens: u64,
    /// Sequences that had to give up their blocks.
    pub preemptions: u64,
    /// Steps.
    pub steps: u64,
    /// Sequences that a stop token or a stop string ended.
    pub stopped: u64,
    /// Sequences that became as long as asked for.
    pub full: u64,
    /// Sequences of which nobody wanted more: the client is gone.
    pub cancelled: u64,
    /// Sequences that could not be continued.
    pub failed: u64,
}

impl Requests {
    /// A way for requests and its two ends.
    pub fn channel() -> (Self, Queue) {
        let (sender, receiver) = channel();
        let statistics = Arc::default();
        (Self { sender, statistics: Arc::clone(&statistics) }, Queue { receiver, statistics })
    }

    /// Asks for a sequence. `on_event` is called on the first rank's thread, between two steps: it should do little.
    ///
    /// The request must be one that [`Request::check`] accepts. Fails if the ranks have stopped.
    pub fn submit(
        &self,
        request: Request,
        on_event: impl FnMut(Event) -> ControlFlow<()> + Send + 'static,
    ) -> Result<Ticket, Stopped> {
        let wanted = Wanted::default();
        let ticket = Ticket { wanted: wanted.clone() };
        let submitted = Submitted { request, on_event: Box::new(on_event), wanted };
        self.sender.send(Message::Request(Box::new(submitted))).map_err(|_| Stopped)?;
        Ok(ticket)
    }

    /// Ends the ranks' loops. Sequences that are not finished fail.
    pub fn stop(&self) {
        // Without a receiver they have ended already.
        let _ = self.sender.send(Message::Stop);
    }

    /// Ends the ranks' loops when all sequences have ended, as when nobody can ask for more.
    pub fn finish(&self) {
        let _ = self.sender.send(Message::Finish);
    }

    /// What the ranks have done so far, as of the last step.
    pub fn statistics(&self) -> Statistics {
        *locked(&self.statistics)
    }
}

/// Numbers alone are behind this lock: they are right wherever a thread ended.
pub(super) fn locked(statistics: &Mutex<Statistics>) -> MutexGuard<'_, Statistics> {
    statistics.lock()
}

impl std::fmt::Debug for Message {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Request(submitted) => f.debug_tuple("Request").field(&submitted.request).finish(),
            Self::Finish => f.write_str("Finish"),
            Self::Stop => f.write_str("Stop"),
        }
    }
}
