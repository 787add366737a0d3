//! Tensors from one member of a group to another.

use super::failing::mismatch;
use super::{Activity, Blob, Codec, GroupId, OpRecord, State, World, unwrap_shared};
use crate::comm::remote::{Frame, Head};
use std::collections::VecDeque;
use std::sync::Arc;

impl World {
    /// Sends `message` to member `to`; does not wait.
    pub(crate) fn send_message<T: Send + Sync + 'static>(
        &self,
        group: GroupId,
        (from, to): (usize, usize),
        payload: String,
        message: T,
        codec: Codec<T>,
    ) {
        let mut state = self.lock();
        self.leave_if_failed(&mut state);
        let g = &mut state.groups[group.index];
        let record = OpRecord {
            name: format!("send to rank {}", g.ranks[to]),
            payload,
            group: g.label.clone(),
            sequence: g.message_count[from],
        };
        g.message_count[from] += 1;
        let (sender, receiver) = (g.ranks[from], g.ranks[to]);
        state.ranks[sender].last = Some(record.clone());
        if let Some(remote) = self.remote.as_ref().filter(|_| !self.is_here(receiver)) {
            drop(state);
            let head = Head::Message { group: record.group.clone(), from, to, receiver, record };
            let via = if remote.process == 0 { remote.process_of(receiver) } else { 0 };
            remote.send(Some(via), &Frame { head, blobs: vec![Blob::new((codec.encode)(&message))] });
            return;
        }
        state.groups[group.index].messages.entry((from, to)).or_default().push_back((record, Arc::new(message)));
        self.wake(&mut state, receiver);
    }

    /// Takes the oldest message from member `from`; it must announce the same `payload`.
    pub(crate) fn receive_message<T: Send + Sync + 'static>(
        &self,
        group: GroupId,
        (from, to): (usize, usize),
        payload: String,
        codec: Codec<T>,
    ) -> T {
        let mut state = self.lock();
        self.leave_if_failed(&mut state);
        let g = &state.groups[group.index];
        let (sender, receiver, label) = (g.ranks[from], g.ranks[to], g.label.clone());
        let issued = OpRecord {
            name: format!("receive from rank {sender}"),
            payload,
            group: label.clone(),
            sequence: g.message_count[to],
        };
        state.ranks[receiver].last = Some(issued.clone());
        let (sent, message) = if self.is_here(sender) {
            let key = (from, to);
            let has_message =
                |s: &State| s.groups[group.index].messages.get(&key).is_some_and(|queue| !queue.is_empty());
            state = self.wait(state, receiver, Activity::Waiting, has_message);
            let message = state.groups[group.index].messages.get_mut(&key).and_then(VecDeque::pop_front);
            let (sent, message) = message.expect("waited until there was a message");
            (sent, Ok(message))
        } else {
            let key = (label, from, to);
            let has_message = |s: &State| s.remote_messages.get(&key).is_some_and(|queue| !queue.is_empty());
            state = self.wait(state, receiver, Activity::WaitingElsewhere, has_message);
            let message = state.remote_messages.get_mut(&key).and_then(VecDeque::pop_front);
            let (sent, message) = message.expect("waited until there was a message");
            (sent, Err(message))
        };
        if sent.payload != issued.payload {
            self.stop(&mut state, receiver, mismatch(issued, sender, sent));
        }
        drop(state);
        match message {
            Ok(here) => unwrap_shared(here),
            Err(bytes) => (codec.decode)(&bytes).unwrap_or_else(|what| self.stop_for(sender, what)),
        }
    }

    /// Takes in a message from a rank of another process.
    pub(super) fn deliver(&self, key: (String, usize, usize), receiver: usize, record: OpRecord, message: Blob) {
        let mut state = self.lock();
        state.remote_messages.entry(key).or_default().push_back((record, message));
        self.wake(&mut state, receiver);
    }

    fn wake(&self, state: &mut State, receiver: usize) {
        if matches!(state.ranks[receiver].activity, Activity::Waiting | Activity::WaitingElsewhere) {
            // It looks at its messages when it wakes; until then it is not stuck.
            state.ranks[receiver].activity = Activity::Running;
        }
        self.changed.notify_all();
    }
}
