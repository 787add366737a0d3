//! The first bytes of a connection: they tell the processes of a run from whoever else connects, and say who each is.

use crate::comm::codec;
use crate::process::ProcessWorld;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::io::{self, Write};
use std::net::TcpStream;
use std::time::Duration;

/// Begins every connection; the last bytes are the version of what follows.
pub(super) const MAGIC: &[u8; 16] = b"burn-megatron 02";
/// Bytes of [`MAGIC`] before the version.
pub(super) const NAME: usize = 14;
/// Most bytes of an introduction, which has the text of a configuration.
pub(super) const LIMIT: usize = 256 << 10;
/// Most letters of a host's name.
pub(super) const HOST: usize = 64;

/// How long a caller may take to say who it is, in all.
pub(super) const MANNERS: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// What process 0 answers: the hosts of all, or why there is no run.
pub(super) type Answer = Result<Vec<String>, String>;

/// Who a process is, and what all must agree on: names with values, in one order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Introduction {
    pub process: usize,
    pub processes: usize,
    pub host: String,
    pub agreement: Vec<(String, String)>,
}

/// The same in all processes of a run. It keeps out what connects by accident: port scanners, other programs and the
/// processes of other runs. Whoever knows the port and the job's number can compute it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct RunToken([u8; 32]);

impl RunToken {
    /// Of what every process of the run has been told. `WORLD_SIZE` is left out: a process that has another one belongs
    /// to the run, and ends it with a message; so is `MASTER_ADDR`, as a host has several names.
    pub fn of(world: &ProcessWorld) -> Self {
        let mut hash = Sha256::new();
        for word in ["burn-megatron run", &world.port.to_string(), &world.run] {
            hash.update((word.len() as u64).to_le_bytes());
            hash.update(word);
        }
        Self(hash.finalize().into())
    }
}

impl Introduction {
    /// What the process sends when it is connected.
    pub(super) fn to_bytes(&self, token: RunToken) -> Vec<u8> {
        let text = codec::to_bytes(self);
        [&MAGIC[..], &token.0, &(text.len() as u32).to_le_bytes(), &text].concat()
    }
}

/// The first bytes of a connection, as process 0 understands them.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// There is more to come.
    Incomplete,
    /// It is no process of this run.
    Stranger(Stranger),
    /// A process of this run.
    Process(Introduction),
}

/// Why a connection is not of this run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Stranger {
    #[error("it is another program")]
    Program,
    #[error("it is another version of burn-megatron")]
    Version,
    #[error("it is a process of another run")]
    Run,
    #[error("its introduction cannot be read")]
    Introduction,
    #[error("it has not said in time who it is")]
    Late,
    #[error("it has hung up")]
    Gone,
    #[error("too many connections were open")]
    Crowd,
}

impl Greeting {
    pub fn parse(bytes: &[u8], token: RunToken) -> Self {
        let begun = bytes.len().min(MAGIC.len());
        if bytes[..begun] != MAGIC[..begun] {
            let is_version = bytes.len() > NAME && bytes[..NAME] == MAGIC[..NAME];
            return Self::Stranger(if is_version { Stranger::Version } else { Stranger::Program });
        }
        let Some((theirs, rest)) = bytes[begun..].split_first_chunk::<32>() else { return Self::Incomplete };
        if *theirs != token.0 {
            return Self::Stranger(Stranger::Run);
        }
        let Some((length, text)) = rest.split_first_chunk::<4>() else { return Self::Incomplete };
        let length = u32::from_le_bytes(*length) as usize;
        if length > LIMIT || text.len() > length {
            return Self::Stranger(Stranger::Introduction);
        }
        if text.len() < length {
            return Self::Incomplete;
        }
        match codec::from_bytes::<Introduction>(text) {
            Ok(introduction) => {
                Self::Process(Introduction { host: printable(&introduction.host, HOST), ..introduction })
            }
            Err(_) => Self::Stranger(Stranger::Introduction),
        }
    }
}

/// Text that another process has sent, for a message: at most so many letters, and none that a terminal would obey.
pub(super) fn printable(text: &str, most: usize) -> String {
    let mut printable = String::new();
    for letter in text.chars().take(most) {
        match letter == ' ' || letter.is_ascii_graphic() || letter.is_alphanumeric() {
            true => printable.push(letter),
            false => printable.extend(letter.escape_debug()),
        }
    }
    if text.chars().nth(most).is_some() {
        printable.push('…');
    }
    printable
}

/// In what a process differs from process 0.
pub(super) fn disagreement(first: &Introduction, other: &Introduction) -> Option<String> {
    let name = |of: &Introduction| format!("process {} on {}", of.process, of.host);
    let processes = |of: &Introduction| vec![("WORLD_SIZE".to_string(), of.processes.to_string())];
    let all = |of: &Introduction| [processes(of), of.agreement.clone()].concat();
    let (ours, theirs) = (all(first), all(other));
    let differs = |(ours, theirs): &(&(String, String), &(String, String))| ours != theirs;
    let says =
        |of: &Introduction, what: &str, value: &str| format!("{} has {what} {}", name(of), printable(value, 200));
    let different = ours.iter().zip(&theirs).find(differs);
    let (what, ours, theirs) = match different {
        Some(((what, ours), (_, theirs))) => (what.as_str(), ours.as_str(), theirs.as_str()),
        None if ours.len() != theirs.len() => ("another number of things to agree on", "", ""),
        None if other.process >= first.processes => {
            return Some(format!("{} is none of the {} processes", name(other), first.processes));
        }
        None => return None,
    };
    // Of a long text, the first line that differs.
    let lines = |a: &str, b: &str| {
        a.lines().find(|line| !b.lines().any(|other| other == *line)).unwrap_or("(nothing more)").trim().to_string()
    };
    let [ours, theirs] = match ours.contains('\n') || theirs.contains('\n') {
        true => [lines(ours, theirs), lines(theirs, ours)],
        false => [ours, theirs].map(str::to_string),
    };
    Some(format!(
        "{}, but {}; all processes must be started alike",
        says(first, what, &ours),
        says(other, what, &theirs)
    ))
}

/// Sends `value` with its length.
pub(super) fn say(stream: &mut TcpStream, value: &impl Serialize) -> io::Result<()> {
    let bytes = codec::to_bytes(value);
    stream.write_all(&[&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat())
}
