//! What the ranks of this process and those of the others send each other.

use super::World;
use crate::comm::failure::{FailureCause, OpRecord, RunError};
use crate::comm::remote::{Blob, Contribution, Frame, Head, Neighbours, OF_PROCESSES, OpKey, Remote, parent};
use std::io;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How soon a thread that sleeps between heartbeats notices that there is no need for more; and how often process 0 hears
/// what GPUs were asked for.
const NAP: Duration = Duration::from_millis(200);

impl World {
    /// Starts the threads that read what the other processes send, send heartbeats, and end a run that has failed. They
    /// are started before they are needed: a process may fail because it can start no more threads. `above` is where the
    /// process above this one in the tree waits for it.
    ///
    /// # Errors
    /// If the system starts no more threads; then the connections are closed.
    pub(crate) fn listen(self: &Arc<Self>, neighbours: Neighbours, above: Option<SocketAddr>) -> io::Result<()> {
        let Some(remote) = &self.remote else { return Ok(()) };
        let start = |name: String, run: Box<dyn FnOnce(&Self) + Send>| {
            let world = self.clone();
            thread::Builder::new().name(name).spawn(move || run(&world)).map(drop)
        };
        let peers = (0..remote.processes()).filter(|&process| remote.peers[process].is_some());
        let listen = |process: usize| -> Box<dyn FnOnce(&Self) + Send> { Box::new(move |it| it.listen_to(process)) };
        let (neighbours, process) = (Arc::new(neighbours), remote.process);
        if neighbours.port().is_some() {
            let neighbours = neighbours.clone();
            start("to processes".into(), Box::new(move |it| it.listen_below(&neighbours)))
                .inspect_err(|_| self.close())?;
        }
        if let Some(address) = above {
            let listen = move |it: &Self| it.listen_above(&neighbours, parent(process), address);
            start(format!("from process {}", parent(process)), Box::new(listen)).inspect_err(|_| self.close())?;
        }
        peers
            .map(|process| start(format!("from process {process}"), listen(process)))
            .chain(std::iter::once_with(|| start("heartbeat".into(), Box::new(Self::send_heartbeats))))
            .chain(std::iter::once_with(|| start("announcer".into(), Box::new(Self::announce_failure))))
            .chain(std::iter::once_with(|| start("watchdog".into(), Box::new(Self::end_at_last))))
            .collect::<io::Result<()>>()
            .inspect_err(|_| self.close())
    }

    /// Ends the connections. A run that has neither finished nor failed here fails in the other processes.
    pub(crate) fn close(&self) {
        if let Some(remote) = &self.remote {
            let mut state = self.lock();
            state.ending.stopped = true;
            self.set_all_finished(state);
            remote.close();
        }
    }

    /// Sends the inputs of the members here to process 0.
    pub(super) fn contribute(&self, op: OpKey, processes: Vec<usize>, contributions: Vec<(Contribution, Blob)>) {
        let remote = self.remote.as_ref().expect("only a world with other processes has collectives that span them");
        if remote.process == 0 {
            let rank = contributions[0].0.rank;
            if let Err(what) = self.coordinate(remote, 0, op, processes, contributions) {
                self.fail(rank, FailureCause::Error(what));
            }
        } else {
            let (contributions, blobs) = contributions.into_iter().unzip();
            remote.send(Some(0), &Frame { head: Head::Contribute { op, processes, contributions }, blobs });
        }
    }

    /// Every process's value under this name, in the order of the processes. Waits in no rank's name, so that threads
    /// that are no ranks may call it; those of one process one after the other.
    ///
    /// # Errors
    /// The first failure of the run.
    pub(crate) fn gather(&self, name: &str, sequence: u64, value: Vec<u8>) -> Result<Vec<Blob>, RunError> {
        let value = Blob::new(value);
        let Some(remote) = &self.remote else { return Ok(vec![value]) };
        let processes: Vec<usize> = (0..remote.processes()).collect();
        let op = OpKey { group: format!("{name}{OF_PROCESSES}"), sequence };
        let record = OpRecord { name: name.into(), payload: String::new(), group: op.group.clone(), sequence };
        let contribution = Contribution { member: remote.process, rank: remote.process * remote.share, record };
        if let Some(failure) = self.lock().failure.clone() {
            return Err(failure);
        }
        self.contribute(op.clone(), processes, vec![(contribution, value.clone())]);
        let mut state = self.lock();
        loop {
            if let Some(others) = state.gathered.remove(&op) {
                let mut all = vec![value; remote.processes()];
                for ((process, _), bytes) in others {
                    match all.get_mut(process) {
                        Some(value) => *value = bytes,
                        None => return Err(self.reject_locked(&mut state, 0, format!("a value of process {process}"))),
                    }
                }
                return Ok(all);
            }
            if let Some(failure) = state.failure.clone() {
                return Err(failure);
            }
            self.changed.wait(&mut state);
        }
    }

    /// Says that all ranks of this process have finished.
    pub(super) fn finish_process(&self) {
        match &self.remote {
            Some(remote) if remote.process == 0 => self.note_finished(remote, 0),
            Some(remote) => remote.send(Some(0), &Head::Finished.into()),
            None => {}
        }
    }

    /// Tells the other processes of the failure; once they know it, or will never, the process may end.
    pub(super) fn announce(&self, error: RunError) {
        let Some(remote) = &self.remote else { return };
        remote.send(None, &Head::Failed(error).into());
        if remote.process == 0 {
            self.lock().ending.settled = true;
            self.changed.notify_all();
        }
    }

    /// Reads what a process sends until the connection ends. Whatever comes, and whatever goes wrong here, the run is
    /// told that it can no longer count on this process.
    fn listen_to(&self, process: usize) {
        let remote = self.remote.as_ref().expect("there is a process to listen to");
        let mut reader = remote.peers[process].as_ref().expect("it is connected").reader();
        let read = || loop {
            match Frame::read(&mut reader) {
                Ok(frame) => {
                    if let Err(what) = self.handle(remote, process, frame) {
                        break format!("it has sent {what}");
                    }
                }
                Err(error) => break connection_end(remote, &error),
            }
        };
        let what = catch_unwind(AssertUnwindSafe(read)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            let text = text.unwrap_or("no message");
            format!("process {} panicked while it read what it sends: {text}", remote.process)
        });
        self.peer_lost(remote, process, what);
    }

    /// Does what a frame says.
    ///
    /// # Errors
    /// What is wrong with it; then nothing was done.
    pub(super) fn handle(&self, remote: &Remote, from: usize, frame: Frame) -> Result<(), String> {
        remote.check(from, &frame)?;
        let Frame { head, mut blobs } = frame;
        match head {
            Head::Heartbeat => {}
            Head::Contribute { op, processes, contributions } => {
                self.coordinate(remote, from, op, processes, contributions.into_iter().zip(blobs).collect())?;
            }
            Head::Gathered { op, members, to } => {
                remote.pass_on(&op, &members, &to, &blobs)?;
                if to.contains(&remote.process) {
                    self.take_gathered(remote, op, members.into_iter().zip(blobs));
                }
            }
            Head::Linked => {
                remote.coordinator.lock().linked.insert(from);
            }
            #[cfg(any(feature = "cuda", test))]
            Head::Issued { reports } => self.compare_issued(remote, from, reports)?,
            Head::Message { group, from, to, receiver, record } => {
                let host = remote.process_of(receiver);
                if host == remote.process {
                    let message = blobs.pop().unwrap_or_default();
                    self.deliver((group, from, to), receiver, record, message);
                } else {
                    remote
                        .send(Some(host), &Frame { head: Head::Message { group, from, to, receiver, record }, blobs });
                }
            }
            Head::Failed(error) => {
                let mut state = self.lock();
                if remote.process > 0 {
                    // The first failure of all processes, whatever has happened here meanwhile.
                    state.ending.settled = true;
                    match state.failure {
                        Some(_) => state.failure = Some(error),
                        None => self.set_failure(&mut state, error),
                    }
                } else if state.failure.is_none() {
                    let error = self.completed(&state, error, from);
                    self.set_failure(&mut state, error);
                }
                self.changed.notify_all();
            }
            Head::Finished if remote.process == 0 => self.note_finished(remote, from),
            Head::Finished => self.set_all_finished(self.lock()),
        }
        Ok(())
    }

    /// The run cannot count on a process any more.
    fn peer_lost(&self, remote: &Remote, process: usize, what: String) {
        let mut state = self.lock();
        if state.ending.over || state.ending.all_finished {
            return;
        }
        self.reject_locked(&mut state, process, what);
        if remote.process > 0 {
            // Nobody is left to ask whether another failure came first.
            state.ending.settled = true;
        }
        self.changed.notify_all();
    }

    fn send_heartbeats(&self) {
        let remote = self.remote.as_ref().expect("there are other processes");
        let pause = remote.silence / 5;
        let mut last = Instant::now();
        while !self.lock().ending.all_finished {
            thread::sleep(pause.min(NAP));
            #[cfg(any(feature = "cuda", test))]
            self.report_issued(remote);
            if last.elapsed() >= pause {
                last = Instant::now();
                remote.peers.iter().flatten().for_each(|peer| peer.heartbeat());
            }
        }
    }
}

/// Why nothing more can be read from a process.
fn connection_end(remote: &Remote, error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            format!("it has given no sign of life for {} s", remote.silence.as_secs())
        }
        io::ErrorKind::InvalidData => format!("what it sends cannot be read ({error})"),
        _ => "its connection ended: it was killed or it crashed".to_string(),
    }
}
