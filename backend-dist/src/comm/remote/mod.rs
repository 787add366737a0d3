//! What joins the worlds of several processes: a star of TCP connections with process 0 in the middle.
//!
//! Process 0 is the hub of every meeting whose members live in several processes. Each of these sends what its members
//! bring; when all have come, the hub compares what they do and sends everybody what the others have brought, and each
//! combines it in group order, so all get the bits that one process would have got. A thread per connection reads and
//! never writes but for the hub's, whose writes go to threads that never write: so no two can wait for each other.

mod frame;
mod hub;
mod rendezvous;

pub(crate) use frame::{Blob, Frame, Head, MeetingKey, Part};
pub(crate) use hub::{Arrival, Hub};
pub(crate) use rendezvous::{Introduction, meet_at};

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::Duration;

/// This process's connections and what is known of the others.
pub(crate) struct Remote {
    /// This process.
    pub process: usize,
    /// Ranks that each process hosts.
    pub share: usize,
    /// The host of each process.
    pub hosts: Vec<String>,
    /// Heartbeats keep silences shorter than this.
    pub silence: Duration,
    /// Connections by process: to all others in process 0, to process 0 in the others.
    pub peers: Vec<Option<Peer>>,
    /// The table of meetings, in process 0.
    pub hub: Mutex<Hub>,
}

impl Remote {
    /// The process that hosts a rank.
    pub fn process_of(&self, rank: usize) -> usize {
        rank / self.share
    }

    /// How many there are.
    pub fn processes(&self) -> usize {
        self.hosts.len()
    }

    /// Sends to a process, or to all that this one is connected to. A process that cannot be sent to is gone; the
    /// thread that reads from it says so.
    pub fn send(&self, to: Option<usize>, frame: &Frame) {
        let peers = self.peers.iter().enumerate().filter(|(process, _)| to.is_none_or(|to| to == *process));
        peers.filter_map(|(_, peer)| peer.as_ref()).for_each(|peer| peer.send(frame));
    }

    /// Ends all connections, and with them the threads that read.
    pub fn close(&self) {
        self.peers.iter().flatten().for_each(Peer::close);
    }
}

/// The connection to one other process.
pub(crate) struct Peer {
    writer: Mutex<TcpStream>,
    reader: TcpStream,
}

impl Peer {
    /// Over a connection whose introduction is over.
    pub fn new(stream: TcpStream, silence: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(silence))?;
        stream.set_write_timeout(Some(silence))?;
        Ok(Self { writer: Mutex::new(stream.try_clone()?), reader: stream })
    }

    /// The end to read from; a read fails after so much silence.
    pub fn reader(&self) -> &TcpStream {
        &self.reader
    }

    fn send(&self, frame: &Frame) {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        // After half a frame nothing that follows could be understood.
        if frame.write(&mut *writer).is_err() {
            self.close();
        }
    }

    /// A sign of life, unless something is being sent anyway.
    pub fn heartbeat(&self) {
        match self.writer.try_lock() {
            Ok(mut writer) => {
                if Frame::from(Head::Alive).write(&mut *writer).is_err() {
                    self.close();
                }
            }
            Err(TryLockError::Poisoned(_) | TryLockError::WouldBlock) => {}
        }
    }

    fn close(&self) {
        // It may be closed already.
        let _ = self.reader.shutdown(Shutdown::Both);
    }
}
