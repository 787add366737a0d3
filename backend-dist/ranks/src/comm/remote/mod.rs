//! What joins the ranks of several processes: a star of TCP connections with process 0 in the middle.
//!
//! Process 0 coordinates every collective whose members are in several processes. Each of these sends the inputs of its
//! members; when all have come, process 0 compares the operations and sends everybody the inputs of the others, and
//! each combines them in group order, so all get the bits that one process would have got. If they are many, process 0
//! sends to eight, which pass it on down a [`tree`]. A thread per connection reads. In process 0 it also writes, to
//! connections whose readers write down the tree or not at all: so no two can wait for each other.

mod caller;
mod coordinator;
mod frame;
#[cfg(test)]
pub(crate) mod fuzz;
mod gate;
mod introduction;
mod links;
mod rendezvous;
#[cfg(test)]
mod tests;
mod tree;
mod validate;

pub(crate) use coordinator::{Arrival, Coordinator, Input};
pub(crate) use frame::{Blob, Contribution, Frame, Head, Member, OpKey};
pub(crate) use introduction::Introduction;
pub(crate) use links::{Links, Neighbours};
pub(crate) use rendezvous::rendezvous;
pub(crate) use tree::{CHILDREN, parent};

#[cfg(any(feature = "cuda", test))]
use super::recorder::ReportedOps;
use crate::process::ProcessWorld;
use parking_lot::Mutex;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

/// Ends the name of a group of processes, not of ranks.
pub(crate) const OF_PROCESSES: &str = " of all processes";

/// This process's connections to the others.
pub(crate) struct Remote {
    /// This process.
    pub process: usize,
    /// Ranks that each process hosts.
    pub share: usize,
    /// The host of each process.
    pub hosts: Vec<String>,
    /// Processes of this host, as the launcher says.
    #[cfg(any(feature = "cuda", test))]
    pub on_host: usize,
    /// Heartbeats keep silences shorter than this.
    pub silence: Duration,
    /// Connections by process: to all others in process 0, to process 0 in the others.
    pub peers: Vec<Option<Peer>>,
    /// The table of pending collectives, in process 0.
    pub coordinator: Mutex<Coordinator>,
    /// What ranks of groups on several hosts have issued on their GPUs, in process 0.
    #[cfg(any(feature = "cuda", test))]
    pub reported: Mutex<ReportedOps>,
    links: Mutex<Links>,
}

impl Remote {
    /// This process of `world`, whose processes are on `hosts` and have `share` ranks each.
    pub fn new(world: &ProcessWorld, share: usize, hosts: Vec<String>, peers: Vec<Option<Peer>>) -> Self {
        Self {
            process: world.process,
            share,
            hosts,
            #[cfg(any(feature = "cuda", test))]
            on_host: world.on_host,
            silence: world.silence,
            peers,
            coordinator: Mutex::default(),
            #[cfg(any(feature = "cuda", test))]
            reported: Mutex::default(),
            links: Mutex::default(),
        }
    }

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

    /// Process 0: sends the inputs of a collective to all processes of `to`, itself or through others.
    pub fn send_gathered(&self, op: &OpKey, inputs: &[Input], to: &[usize]) {
        let routes = {
            let coordinator = self.coordinator.lock();
            tree::routes(to, |process| coordinator.linked.contains(&process))
        };
        for (first, to) in routes {
            // One process has its own inputs.
            let inputs = inputs.iter().filter(|input| to != [input.process]);
            let (members, blobs) = inputs.map(|input| (input.as_member(), input.blob.clone())).unzip();
            self.send(Some(first), &Frame { head: Head::Gathered { op: op.clone(), members, to }, blobs });
        }
    }

    /// Passes the inputs of a collective on to the processes below this one that are to have them.
    ///
    /// # Errors
    /// If one of them is not connected to this one.
    pub fn pass_on(&self, op: &OpKey, members: &[Member], to: &[usize], blobs: &[Blob]) -> Result<(), String> {
        for (child, to) in tree::below(self.process, to) {
            let peer = self.links().below.get(&child).cloned();
            let peer = peer.ok_or_else(|| format!("something for process {child}, which this one cannot reach"))?;
            let head = Head::Gathered { op: op.clone(), members: members.to_vec(), to };
            peer.send(&Frame { head, blobs: blobs.to_vec() });
        }
        Ok(())
    }

    /// Ends all connections, and with them the threads that read.
    pub fn close(&self) {
        self.peers.iter().flatten().for_each(Peer::close);
        self.links().close();
    }
}

/// The connection to one other process.
pub(crate) struct Peer {
    writer: Mutex<TcpStream>,
    reader: TcpStream,
    /// Frames and the bytes of their blobs that were sent, without heartbeats.
    #[cfg(test)]
    pub sent: Mutex<(usize, usize)>,
}

impl Peer {
    /// Over a connection whose introduction is over.
    pub fn new(stream: TcpStream, silence: Duration) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(silence))?;
        stream.set_write_timeout(Some(silence))?;
        Ok(Self {
            writer: Mutex::new(stream.try_clone()?),
            reader: stream,
            #[cfg(test)]
            sent: Mutex::default(),
        })
    }

    /// The end to read from; a read fails after so much silence.
    pub fn reader(&self) -> &TcpStream {
        &self.reader
    }

    fn send(&self, frame: &Frame) {
        #[cfg(test)]
        {
            let mut sent = self.sent.lock();
            *sent = (sent.0 + 1, sent.1 + frame.blobs.iter().map(|blob| blob.len()).sum::<usize>());
        }
        let mut writer = self.writer.lock();
        // After half a frame nothing that follows could be understood.
        if frame.write(&mut *writer).is_err() {
            self.close();
        }
    }

    /// A sign of life, unless something is being sent anyway.
    pub fn heartbeat(&self) {
        if let Some(mut writer) = self.writer.try_lock()
            && Frame::from(Head::Heartbeat).write(&mut *writer).is_err()
        {
            self.close();
        }
    }

    fn close(&self) {
        // It may be closed already.
        let _ = self.reader.shutdown(Shutdown::Both);
    }
}
