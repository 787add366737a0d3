//! What a run says when a rank fails.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Begins [`RunError::coords`] of a process that has failed outside of launches, with none of its ranks.
pub(crate) const PROCESS: &str = "process ";

/// One operation that a rank issued, as the flight recorder stores it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpRecord {
    /// Name of the operation, for example `all-reduce(sum)`.
    pub name: String,
    /// Element type and shape of its input, empty for operations without a tensor.
    pub payload: String,
    /// Name and members of the group, for example `tp[0, 1]`.
    pub group: String,
    /// How many operations this rank had issued on the group before this one.
    pub sequence: u64,
}

impl fmt::Display for OpRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        if !self.payload.is_empty() {
            write!(f, " {}", self.payload)?;
        }
        write!(f, " on {} (operation {} of the group)", self.group, self.sequence)
    }
}

/// Why a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureCause {
    /// The rank's code panicked; message and position.
    Panic(String),
    /// The rank's code returned an error.
    Error(String),
    /// The rank issued another operation than a peer of its group had issued at the same position.
    Mismatch {
        /// What this rank issued.
        issued: Box<OpRecord>,
        /// The global rank it disagrees with.
        peer: usize,
        /// What that rank issued.
        expected: Box<OpRecord>,
    },
    /// The rank has finished without an operation in which the GPU of a peer waits for it.
    Missing {
        /// The global rank that waits.
        peer: usize,
        /// What it has issued.
        waiting_in: Box<OpRecord>,
    },
    /// Every rank waits or has finished, so nobody can ever make progress.
    Deadlock,
    /// A peer did not arrive in time.
    Timeout {
        /// What this rank waited in.
        waiting_in: Box<OpRecord>,
        /// How long, in seconds.
        seconds: u64,
    },
    /// A process of the world is gone; the rank is its first.
    Lost(Box<LostProcess>),
}

/// A process that is gone, as another one noticed it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostProcess {
    /// The process.
    pub process: usize,
    /// Its host.
    pub host: String,
    /// Its first and its last rank.
    pub ranks: (usize, usize),
    /// How that was noticed.
    pub what: String,
}

impl fmt::Display for LostProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { process, host, ranks: (first, last), what } = self;
        let ranks = if first == last { format!("rank {first}") } else { format!("ranks {first} to {last}") };
        write!(f, "process {process} on {host} ({ranks}) is gone: {what}; its own output may say why")
    }
}

/// The first failure of a run: which rank, why, and what every rank was doing at that moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub struct RunError {
    /// Global rank that failed.
    pub rank: usize,
    /// Coordinates of that rank in the mesh, for example `tp 1, dp 0`; `process 1` for a process that has failed
    /// outside of launches.
    pub coords: String,
    /// Why.
    pub cause: FailureCause,
    /// One line per rank: what it was doing.
    pub ranks: Vec<String>,
}

impl RunError {
    /// Which rank, why, and what that rank was doing, in one line.
    pub fn summary(&self) -> String {
        let doing = self.ranks.get(self.rank).and_then(|line| line.split_once(": "));
        let doing = doing.map(|(_, doing)| format!("; {doing}")).unwrap_or_default();
        format!("{}{doing}", self.first_line()).replace('\n', " ")
    }

    fn is_process(&self) -> bool {
        self.coords.starts_with(PROCESS)
    }

    /// Which rank, and why.
    fn first_line(&self) -> String {
        let is_process = self.is_process();
        let who = match self.coords.as_str() {
            "" => format!("rank {}", self.rank),
            process if is_process => process.to_string(),
            coords => format!("rank {} ({coords})", self.rank),
        };
        match &self.cause {
            FailureCause::Panic(message) => format!("{who} panicked: {message}"),
            FailureCause::Error(message) => format!("{who} failed: {message}"),
            FailureCause::Mismatch { issued, peer, expected } => format!(
                "{who} issued {issued}, but rank {peer} issued {expected}: all ranks of a group must issue the same \
                 operations in the same order with the same shapes"
            ),
            FailureCause::Missing { peer, waiting_in } => format!(
                "{who} has finished without {waiting_in}, in which rank {peer} waits: all ranks of a group must issue \
                 the same operations in the same order"
            ),
            FailureCause::Deadlock => {
                format!("deadlock, seen by {who}: every rank waits for another one or has finished")
            }
            FailureCause::Timeout { waiting_in, seconds } => {
                format!("{who} waited {seconds} s in {waiting_in}; the ranks that did not arrive are listed below")
            }
            FailureCause::Lost(lost) if is_process => {
                format!("{who} on {} is gone: {}; its own output may say why", lost.host, lost.what)
            }
            FailureCause::Lost(lost) => lost.to_string(),
        }
    }
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.first_line())?;
        if self.ranks.len() > 1 && !self.is_process() {
            for line in &self.ranks {
                write!(f, "\n  {line}")?;
            }
        }
        Ok(())
    }
}

/// Panic payload of a rank that stops because the run has already failed; never shown to a user.
pub struct Aborted;
