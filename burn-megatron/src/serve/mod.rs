//! Texts for many at once: continuous batching over a paged cache of keys and values.
//!
//! A [`Scheduler`] says which sequences a step reads and which blocks of the cache they have. [`run`] is every rank's loop
//! around it: the first rank takes requests from a [`Queue`], tells all ranks what to read, and chooses tokens. What a
//! sequence says does not depend on the others.

mod engine;
#[cfg(feature = "serve")]
pub mod http;
mod queue;
mod request;
mod scheduler;
mod sequences;
mod stop;
#[cfg(test)]
mod tests;

pub use crate::generate::{Likely, TokenLogprobs};
pub use engine::{run, run_from};
pub use queue::{Queue, Requests, Statistics, Stopped, Ticket};
pub use request::{Event, Finish, Request, RequestError};
pub use scheduler::{Scheduled, Scheduler, SchedulerConfig, SchedulerError};
pub use stop::StopStrings;
