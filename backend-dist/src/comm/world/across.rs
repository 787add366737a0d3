//! A world's dealings with the other processes.

use super::{Activity, State, World};
use crate::comm::failure::{FailureCause, LostProcess, OpRecord, RunError};
use crate::comm::remote::{Arrival, Blob, Frame, Head, MeetingKey, Part, Remote};
use std::sync::{Arc, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Ends the name of what is gathered from processes, not from ranks.
const OF_PROCESSES: &str = " of all processes";
/// How soon a thread that sleeps between heartbeats notices that there is no need for more.
const NAP: Duration = Duration::from_secs(1);

impl World {
    /// Starts to listen to the other processes and to give them signs of life.
    pub(crate) fn listen(self: &Arc<Self>) {
        let Some(remote) = &self.remote else { return };
        for process in (0..remote.processes()).filter(|&process| remote.peers[process].is_some()) {
            let world = self.clone();
            let name = format!("from process {process}");
            let listen = move || world.listen_to(process);
            thread::Builder::new().name(name).spawn(listen).expect("the system can start a thread per process");
        }
        let world = self.clone();
        let beat = move || world.beat();
        thread::Builder::new().name("heartbeat".into()).spawn(beat).expect("the system can start a thread");
    }

    /// Ends the connections. A run that has neither finished nor failed here fails in the other processes.
    pub(crate) fn close(&self) {
        if let Some(remote) = &self.remote {
            self.lock().ending.all_finished = true;
            self.changed.notify_all();
            remote.close();
        }
    }

    /// Brings what the members here bring to a meeting.
    pub(super) fn bring(&self, meeting: MeetingKey, processes: Vec<usize>, parts: Vec<(Part, Blob)>) {
        let remote = self.remote.as_ref().expect("only a world with other processes has meetings that span them");
        if remote.process == 0 {
            self.host(remote, 0, meeting, processes, parts);
        } else {
            let (parts, blobs) = parts.into_iter().unzip();
            remote.send(Some(0), &Frame { head: Head::Bring { meeting, processes, parts }, blobs });
        }
    }

    /// What every process has brought under this name, in the order of the processes. Waits in nobody's name, so that
    /// threads that are no ranks may call it; those of one process one after the other.
    ///
    /// # Errors
    /// The first failure of the run.
    pub(crate) fn gather(&self, name: &str, sequence: u64, value: Vec<u8>) -> Result<Vec<Blob>, RunError> {
        let value = Blob::new(value);
        let Some(remote) = &self.remote else { return Ok(vec![value]) };
        let processes: Vec<usize> = (0..remote.processes()).collect();
        let meeting = MeetingKey { group: format!("{name}{OF_PROCESSES}"), sequence };
        let record = OpRecord { name: name.into(), payload: String::new(), group: meeting.group.clone(), sequence };
        let part = Part { member: remote.process, rank: remote.process * remote.share, record };
        if let Some(failure) = self.lock().failure.clone() {
            return Err(failure);
        }
        self.bring(meeting.clone(), processes, vec![(part, value.clone())]);
        let mut state = self.lock();
        loop {
            if let Some(others) = state.met.remove(&meeting) {
                let mut all = vec![value; remote.processes()];
                others.into_iter().for_each(|(process, bytes)| all[process] = bytes);
                return Ok(all);
            }
            if let Some(failure) = state.failure.clone() {
                return Err(failure);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
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

    fn listen_to(&self, process: usize) {
        let remote = self.remote.as_ref().expect("there is a process to listen to");
        let mut reader = remote.peers[process].as_ref().expect("it is connected").reader();
        loop {
            match Frame::read(&mut reader) {
                Ok(frame) => self.receive(remote, process, frame),
                Err(error) => return self.lose(remote, process, &error),
            }
        }
    }

    fn receive(&self, remote: &Remote, from: usize, Frame { head, mut blobs }: Frame) {
        match head {
            Head::Alive => {}
            Head::Bring { meeting, processes, parts } => {
                self.host(remote, from, meeting, processes, parts.into_iter().zip(blobs).collect());
            }
            Head::Met { meeting, members } => {
                self.lock().met.insert(meeting, members.into_iter().zip(blobs).collect());
                self.changed.notify_all();
            }
            Head::Mail { group, from, to, receiver, record } => {
                let host = remote.process_of(receiver);
                if host == remote.process {
                    let message = blobs.pop().unwrap_or_default();
                    self.deliver((group, from, to), receiver, record, message);
                } else {
                    remote.send(Some(host), &Frame { head: Head::Mail { group, from, to, receiver, record }, blobs });
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
            Head::Finished => {
                self.lock().ending.all_finished = true;
                self.changed.notify_all();
            }
        }
    }

    /// Process 0: enters an arrival, and sends everybody on when it was the last.
    fn host(
        &self,
        remote: &Remote,
        process: usize,
        meeting: MeetingKey,
        processes: Vec<usize>,
        parts: Vec<(Part, Blob)>,
    ) {
        if process > 0 && !meeting.group.ends_with(OF_PROCESSES) {
            let mut state = self.lock();
            for (part, _) in &parts {
                let last = Some(part.record.clone());
                state.ranks[part.rank].activity = Activity::WaitingElsewhere;
                state.ranks[part.rank].last = last;
            }
        }
        let arrival =
            remote.hub.lock().unwrap_or_else(PoisonError::into_inner).bring(process, meeting.clone(), processes, parts);
        match arrival {
            Arrival::Waits => {}
            Arrival::Never(rank, cause) => self.fail(rank, cause),
            Arrival::Complete(all) => {
                for (process, others) in all {
                    if process == 0 {
                        self.lock().met.insert(meeting.clone(), others);
                        self.changed.notify_all();
                        continue;
                    }
                    self.set_running(&mut self.lock(), remote, process, &meeting);
                    let (members, blobs) = others.into_iter().unzip();
                    remote.send(Some(process), &Frame { head: Head::Met { meeting: meeting.clone(), members }, blobs });
                }
            }
        }
    }

    /// The ranks of another process go on after a meeting.
    fn set_running(&self, state: &mut State, remote: &Remote, process: usize, meeting: &MeetingKey) {
        for rank in process * remote.share..(process + 1) * remote.share {
            let it = &mut state.ranks[rank];
            if it.last.as_ref().is_some_and(|last| last.group == meeting.group && last.sequence == meeting.sequence) {
                it.activity = Activity::Running;
            }
        }
    }

    /// Process 0: all ranks of a process have finished.
    fn note_finished(&self, remote: &Remote, process: usize) {
        let mut hub = remote.hub.lock().unwrap_or_else(PoisonError::into_inner);
        let waits_for_it = hub.finish(process);
        let all = hub.finished() == remote.processes();
        drop(hub);
        let mut state = self.lock();
        for rank in process * remote.share..(process + 1) * remote.share {
            state.ranks[rank].activity = Activity::Finished;
        }
        if let Some(rank) = waits_for_it {
            self.fail_locked(&mut state, rank, FailureCause::Deadlock);
        }
        if all && state.failure.is_none() {
            state.ending.over = true;
            drop(state);
            remote.send(None, &Head::Finished.into());
            self.lock().ending.all_finished = true;
            self.changed.notify_all();
        }
    }

    /// The connection to a process has ended.
    fn lose(&self, remote: &Remote, process: usize, error: &std::io::Error) {
        let mut state = self.lock();
        if state.ending.over || state.ending.all_finished {
            return;
        }
        let what = match error.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                format!("it has given no sign of life for {} s", remote.silence.as_secs())
            }
            std::io::ErrorKind::InvalidData => format!("what it sends cannot be read ({error})"),
            _ => "its connection ended: it was killed or it crashed".to_string(),
        };
        let ranks = (process * remote.share, (process + 1) * remote.share - 1);
        let host = remote.hosts[process].clone();
        self.fail_locked(&mut state, ranks.0, FailureCause::Lost(Box::new(LostProcess { process, host, ranks, what })));
        if remote.process > 0 {
            // Nobody is left to ask whether another failure came first.
            state.ending.settled = true;
        }
        self.changed.notify_all();
    }

    fn beat(&self) {
        let remote = self.remote.as_ref().expect("there are other processes");
        let pause = remote.silence / 5;
        let mut last = Instant::now();
        while !self.lock().ending.all_finished {
            thread::sleep(pause.min(NAP));
            if last.elapsed() >= pause {
                last = Instant::now();
                remote.peers.iter().flatten().for_each(|peer| peer.heartbeat());
            }
        }
    }
}
