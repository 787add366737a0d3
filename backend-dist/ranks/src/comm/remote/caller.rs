//! Connections to process 0 before it knows who is at their other end.

use super::gate::{Gate, Nonce, nonce};
use super::introduction::{Answer, Greeting, LIMIT, MAGIC, MANNERS, Stranger, say};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

/// A connection that has not said yet who it is. It is read without waiting, so it needs no thread.
pub(super) struct Caller {
    stream: TcpStream,
    pub address: SocketAddr,
    since: Instant,
    bytes: Vec<u8>,
    nonce: Nonce,
}

/// A connection to a process of the run, and the nonces of its ends.
pub(super) struct Friend {
    pub stream: TcpStream,
    pub nonces: [Nonce; 2],
}

impl Caller {
    pub fn new(mut stream: TcpStream, address: SocketAddr) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let nonce = nonce().map_err(io::Error::other)?;
        // A caller of another version reads the first of it and knows.
        stream.write_all(&[&MAGIC[..], &nonce].concat())?;
        Ok(Self { stream, address, since: Instant::now(), bytes: Vec::new(), nonce })
    }

    /// Reads what has come.
    pub fn listen(&mut self, gate: &Gate) -> Greeting {
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Greeting::Stranger(Stranger::Gone),
                Ok(read) => self.bytes.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return Greeting::Stranger(Stranger::Gone),
            }
            match Greeting::parse(&self.bytes, gate, &self.nonce) {
                Greeting::Incomplete => {}
                greeting => return greeting,
            }
        }
        match self.since.elapsed() > MANNERS {
            true => Greeting::Stranger(Stranger::Late),
            false => Greeting::Incomplete,
        }
    }

    /// Hangs up, with an answer if there is one; it is short enough for the system to take it at once. Nobody vouches for
    /// it: a stranger could not tell.
    pub fn hang_up(mut self, reason: Option<String>) {
        // What a stranger hears does not matter to the run.
        let _ = reason.map(|reason| say(&mut self.stream, &Answer::Err(reason), [0; 32]));
        // Where something is left unread, the system takes back what was said.
        let mut rest = [0; 4096];
        let _ = (0..LIMIT / rest.len()).find(|_| !matches!(self.stream.read(&mut rest), Ok(1..)));
    }

    /// `caller` is the nonce that came with its introduction.
    pub fn into_friend(self, caller: Nonce) -> io::Result<Friend> {
        self.stream.set_nonblocking(false)?;
        self.stream.set_write_timeout(Some(MANNERS))?;
        Ok(Friend { stream: self.stream, nonces: [self.nonce, caller] })
    }
}

/// Connections that were not of this run.
#[derive(Default)]
pub(super) struct Strangers {
    pub count: usize,
}

impl Strangers {
    pub fn note(&mut self, port: u16, address: SocketAddr, why: Stranger) {
        self.count += 1;
        if self.count == 1 {
            // Nothing depends on whether somebody reads it.
            let _ = writeln!(
                io::stderr(),
                "process 0 has closed a connection from {address} to port {port}: {why}. Others that are not of this \
                 run are closed without a message"
            );
        }
    }
}
