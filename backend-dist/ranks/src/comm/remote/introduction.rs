//! The first bytes of a connection: they tell the processes of a run from whoever else connects, and say who each is.

use super::gate::{BYTES, End, Gate, Nonce};
use crate::comm::codec;
use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// Begins every connection; the last bytes are the version of what follows.
pub(super) const MAGIC: &[u8; 16] = b"burn-megatron 04";
/// Bytes of [`MAGIC`] before the version.
pub(super) const NAME: usize = 14;
/// Most bytes of an introduction, which has the text of a configuration.
pub(super) const LIMIT: usize = 256 << 10;
/// Most letters of a host's name.
pub(super) const HOST: usize = 64;

/// How long a caller may take to say who it is, in all.
pub(super) const MANNERS: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// What process 0 answers: the hosts of all, and where they wait for processes below them; or why there is no run.
pub(super) type Answer = Result<Vec<Place>, String>;

/// The host of a process, and where it waits for the processes below it, if there are any.
pub(super) type Place = (String, Option<SocketAddr>);

/// Who a process is, and what all must agree on: names with values, in one order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Introduction {
    pub process: usize,
    pub processes: usize,
    pub host: String,
    pub agreement: Vec<(String, String)>,
    /// Where it waits for the processes below it.
    pub port: Option<u16>,
}

impl Introduction {
    /// What the process sends when it has heard process 0's nonce: the token of the run, a nonce of its own, the proof
    /// that it knows the secret, and who it is.
    pub(super) fn to_bytes(&self, gate: &Gate, [first, caller]: [&Nonce; 2]) -> Vec<u8> {
        let text = codec::to_bytes(self);
        let proof = gate.proof(End::Caller, [first, caller], &text);
        [&MAGIC[..], &gate.token, caller, &proof, &(text.len() as u32).to_le_bytes(), &text].concat()
    }
}

/// The first bytes of a connection, as process 0 understands them.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// There is more to come.
    Incomplete,
    /// It is no process of this run.
    Stranger(Stranger),
    /// A process of this run, and its nonce.
    Process(Introduction, Nonce),
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
    #[error("it does not know the secret of the run")]
    Secret,
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
    /// `nonce` is what process 0 has sent over this connection.
    pub fn parse(bytes: &[u8], gate: &Gate, nonce: &Nonce) -> Self {
        let begun = bytes.len().min(MAGIC.len());
        if bytes[..begun] != MAGIC[..begun] {
            let is_version = bytes.len() > NAME && bytes[..NAME] == MAGIC[..NAME];
            return Self::Stranger(if is_version { Stranger::Version } else { Stranger::Program });
        }
        let Some((token, rest)) = bytes[begun..].split_first_chunk::<BYTES>() else { return Self::Incomplete };
        if *token != gate.token {
            return Self::Stranger(Stranger::Run);
        }
        let Some((caller, rest)) = rest.split_first_chunk::<BYTES>() else { return Self::Incomplete };
        let Some((proof, rest)) = rest.split_first_chunk::<BYTES>() else { return Self::Incomplete };
        let Some((length, text)) = rest.split_first_chunk::<4>() else { return Self::Incomplete };
        let length = u32::from_le_bytes(*length) as usize;
        if length > LIMIT || text.len() > length {
            return Self::Stranger(Stranger::Introduction);
        }
        if text.len() < length {
            return Self::Incomplete;
        }
        if !gate.accepts(proof, End::Caller, [nonce, caller], text) {
            return Self::Stranger(Stranger::Secret);
        }
        match codec::from_bytes::<Introduction>(text) {
            Ok(introduction) => {
                let host = printable(&introduction.host, HOST);
                Self::Process(Introduction { host, ..introduction }, *caller)
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
/// An answer, with the proof of [`Gate::proof`].
pub(super) fn say(stream: &mut TcpStream, answer: &Answer, proof: Nonce) -> io::Result<()> {
    let bytes = codec::to_bytes(answer);
    stream.write_all(&[&proof[..], &(bytes.len() as u32).to_le_bytes(), &bytes].concat())
}
