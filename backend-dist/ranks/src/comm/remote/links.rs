//! Connections between processes other than the first, over which the outcomes of collectives go down the tree.
//!
//! They are made while the run begins, and nobody waits for them: until process 0 has heard that there is one, and where
//! a firewall closes its port, process 0 sends to the process itself. Who calls proves that it knows the run's secret,
//! as at process 0, and so does who answers. What is sent there is what process 0 sends.

use super::caller::Caller;
use super::gate::Gate;
use super::introduction::{Answer, Greeting, Introduction, MANNERS};
use super::rendezvous::{CROWD, LOOK, answer, introduce, listen, listen_addresses};
use super::tree::{CHILDREN, children};
use super::{Peer, Remote};
use crate::process::ProcessWorld;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a process waits for those below it to call.
const PATIENCE: Duration = Duration::from_secs(60);

/// The connections of a process to those next to it in the tree, without process 0.
#[derive(Default)]
pub(crate) struct Links {
    pub(super) below: BTreeMap<usize, Arc<Peer>>,
    above: Option<TcpStream>,
    is_closed: bool,
}

impl Links {
    pub(super) fn close(&mut self) {
        self.is_closed = true;
        self.below.values().for_each(|peer| peer.close());
        // It may be closed already.
        let _ = self.above.as_ref().map(|stream| stream.shutdown(std::net::Shutdown::Both));
    }
}

/// Where a process waits for those below it, and finds the one above it.
pub(crate) struct Neighbours {
    world: ProcessWorld,
    /// Until all are there.
    listener: Mutex<Option<TcpListener>>,
}

impl Neighbours {
    /// Listens, if there are processes below this one. Without a port they are served by process 0.
    pub fn of(world: &ProcessWorld) -> Self {
        let open = || {
            let own = ProcessWorld { port: 0, ..world.clone() };
            let addresses: Vec<SocketAddr> = (own.address.as_str(), own.port).to_socket_addrs()?.collect();
            listen(&listen_addresses(&own, &addresses))
        };
        let is_above = world.process > 0 && !children(world.process, world.processes).is_empty();
        Self { world: world.clone(), listener: Mutex::new(is_above.then(|| open().ok()).flatten()) }
    }

    /// The port on which this process waits for others.
    pub fn port(&self) -> Option<u16> {
        self.listener().as_ref()?.local_addr().ok().map(|address| address.port())
    }

    /// Takes in the processes below this one, until all are there, nobody comes any more, or the run `is_over`.
    pub fn take_in(&self, remote: &Remote, is_over: impl Fn() -> bool) {
        let Some(listener) = self.listener().take() else { return };
        let (gate, start) = (Gate::of(&self.world), Instant::now());
        let (mut missing, mut callers) = (children(remote.process, remote.processes()).collect::<Vec<_>>(), Vec::new());
        while !missing.is_empty() && start.elapsed() < PATIENCE && !is_over() {
            for (stream, address) in std::iter::from_fn(|| listener.accept().ok()).take(CROWD) {
                // More than so many are hung up on.
                callers.extend(Caller::new(stream, address).ok().filter(|_| callers.len() < CHILDREN + CROWD));
            }
            for mut caller in std::mem::take(&mut callers) {
                match caller.listen(&gate) {
                    Greeting::Incomplete => callers.push(caller),
                    Greeting::Stranger(_) => caller.hang_up(None),
                    Greeting::Process(Introduction { process, .. }, nonce) => {
                        let place = missing.iter().position(|it| *it == process);
                        if let (Some(place), Ok(mut friend)) = (place, caller.into_friend(nonce))
                            && let Ok(peer) = friend.stream.try_clone().and_then(|own| Peer::new(own, remote.silence))
                        {
                            missing.swap_remove(place);
                            remote.links().below.insert(process, Arc::new(peer));
                            // One that does not hear it is served by process 0.
                            let _ = answer(&mut friend, &gate, &Answer::Ok(Vec::new()));
                        }
                    }
                }
            }
            thread::sleep(LOOK);
        }
    }

    fn listener(&self) -> MutexGuard<'_, Option<TcpListener>> {
        self.listener.lock()
    }

    /// Connects to the process above this one and returns the end to read from.
    ///
    /// # Errors
    /// If it cannot be reached, is none of the run, or the run has ended meanwhile.
    pub fn call(&self, remote: &Remote, address: SocketAddr) -> io::Result<TcpStream> {
        let ProcessWorld { process, processes, .. } = self.world;
        let me = Introduction { process, processes, host: String::new(), agreement: Vec::new(), port: None };
        let stream = TcpStream::connect_timeout(&address, MANNERS)?;
        let (stream, answer) = introduce(stream, &me, &Gate::of(&self.world), MANNERS, &self.world)?;
        answer.map_err(io::Error::other)?;
        // Process 0 notices a process that falls silent.
        stream.set_read_timeout(None)?;
        let mut links = remote.links();
        if links.is_closed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        links.above = Some(stream.try_clone()?);
        Ok(stream)
    }
}

impl Remote {
    pub(super) fn links(&self) -> MutexGuard<'_, Links> {
        self.links.lock()
    }
}
