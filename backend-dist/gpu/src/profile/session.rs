//! A profile from its start to its end.

use super::note::{self, Marks};
use super::{Note, Profile, Source, cupti, events, record};
use crate::cuda::enter;
use cudarc::driver::result as driver;
use std::collections::BTreeSet;
use std::time::Instant;

/// Profiles all GPUs of this process. One at a time; its methods are called on one thread while all ranks of the
/// process wait.
#[derive(Debug)]
pub struct Session {
    source: Source,
    /// CUPTI's clock, or nanoseconds since `origin`.
    begin: u64,
    origin: Instant,
}

impl Session {
    /// Starts recording. The first steps are slower; [`Session::begin`] drops them.
    ///
    /// # Errors
    /// Without GPUs.
    pub fn start() -> Result<Self, String> {
        let source = match cupti::start() {
            Ok(version) => Source::Cupti { version },
            Err(why) => Source::Events { why },
        };
        let session = Self { source, begin: 0, origin: Instant::now() };
        note::set(if session.traces() { Marks::Cupti } else { Marks::Events });
        Ok(session)
    }

    /// The profile begins here.
    ///
    /// # Errors
    /// If a GPU has failed, or CUPTI does not return its records.
    pub fn begin(&mut self) -> Result<(), String> {
        settle(&note::take())?;
        events::forget();
        if self.traces() {
            cupti::take()?;
        }
        self.begin = self.now();
        Ok(())
    }

    /// The profile ends here.
    ///
    /// # Errors
    /// If a GPU has failed, CUPTI does not return its records, or an event cannot be read.
    pub fn end(self) -> Result<Profile, String> {
        let notes = note::take();
        settle(&notes)?;
        let window = [self.begin, self.now()];
        if !self.traces() {
            let Source::Events { why } = self.source.clone() else { unreachable!("there are two sources") };
            return events::profile(why, window[1] - window[0], notes).map_err(|error| error.to_string());
        }
        let (records, dropped) = cupti::take()?;
        let noted = notes.into_iter().map(|note| (note.id, note.noted)).collect();
        let profile = record::assemble(self.source.clone(), window, noted, &records, cupti::name);
        Ok(Profile { dropped, ..profile })
    }

    fn traces(&self) -> bool {
        matches!(self.source, Source::Cupti { .. })
    }

    fn now(&self) -> u64 {
        if self.traces() { cupti::now() } else { self.origin.elapsed().as_nanos() as u64 }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        note::set(Marks::Off);
        if self.traces() {
            cupti::stop();
        }
    }
}

/// Waits for all streams of the GPUs with recorded operations: collectives may still run next to a rank's own stream.
fn settle(notes: &[Note]) -> Result<(), String> {
    let before = driver::ctx::get_current().map_err(|error| error.to_string())?;
    for gpu in notes.iter().map(|note| note.noted.gpu).collect::<BTreeSet<usize>>() {
        enter(gpu).and_then(|()| driver::ctx::synchronize()).map_err(|error| format!("GPU {gpu}: {error}"))?;
    }
    // SAFETY: it was current before, and primary contexts live as long as the process.
    unsafe { driver::ctx::set_current(before.unwrap_or(std::ptr::null_mut())) }.map_err(|error| error.to_string())
}
