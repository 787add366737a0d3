//! Meetings: every member of a group brings something, all leave with the same.

use super::failing::mismatch;
use super::{
    Activity, Blob, Codec, GroupId, Meeting, MeetingKey, OpRecord, Part, Shared, World, decoded, unwrap_shared,
};
use std::sync::Arc;

impl World {
    /// All members bring `input`; the last one of each process to arrive runs `combine` on all inputs in group order;
    /// all get its result. `codec` is for inputs of other processes.
    pub(crate) fn meet<I, O>(
        &self,
        group: GroupId,
        member: usize,
        (name, payload): (String, String),
        input: I,
        codec: Codec<I>,
        combine: impl FnOnce(Vec<I>) -> O,
    ) -> Arc<O>
    where
        I: Send + Sync + 'static,
        O: Send + Sync + 'static,
    {
        let bytes = group.across.then(|| Blob::new((codec.encode)(&input)));
        let mut state = self.lock();
        self.leave_if_failed(&state);
        let (sequence, rank, here, record) = {
            let g = &mut state.groups[group.index];
            let sequence = g.entered[member];
            g.entered[member] += 1;
            let record = OpRecord { name, payload, group: g.label.clone(), sequence };
            (sequence, g.ranks[member], g.here, record)
        };
        state.ranks[rank].last = Some(record.clone());
        let first = state.groups[group.index].meetings.get(&sequence).map(|meeting| meeting.first.clone());
        if let Some((peer, expected)) = first.filter(|(_, expected)| *expected != record) {
            self.stop(&mut state, rank, mismatch(record, peer, expected));
        }
        let size = state.groups[group.index].ranks.len();
        let meeting = state.groups[group.index].meetings.entry(sequence).or_insert_with(|| Meeting {
            first: (rank, record.clone()),
            inputs: (0..size).map(|_| None).collect(),
            parts: Vec::new(),
            arrived: 0,
            output: None,
            left: 0,
        });
        meeting.inputs[member] = Some(Arc::new(input));
        meeting.parts.extend(bytes.map(|bytes| (Part { member, rank, record }, bytes)));
        meeting.arrived += 1;
        if meeting.arrived == here {
            let (inputs, parts) = (std::mem::take(&mut meeting.inputs), std::mem::take(&mut meeting.parts));
            let (label, processes) = {
                let g = &state.groups[group.index];
                (g.label.clone(), g.processes.clone())
            };
            drop(state);
            let mut inputs: Vec<Option<I>> =
                inputs.into_iter().map(|input| input.map(|input| unwrap_shared::<I>(input))).collect();
            if group.across {
                let key = MeetingKey { group: label, sequence };
                for (member, bytes) in self.swap(rank, key, processes, parts) {
                    inputs[member] = Some(decoded(codec, &bytes));
                }
            }
            let inputs = inputs.into_iter().map(|input| input.expect("every member has brought its input")).collect();
            let output: Shared = Arc::new(combine(inputs));
            state = self.lock();
            self.leave_if_failed(&state);
            let members = state.groups[group.index].ranks.clone();
            for peer in members {
                state.ranks[peer].activity = Activity::Running;
            }
            state.groups[group.index]
                .meetings
                .get_mut(&sequence)
                .expect("a meeting stays until all have left")
                .output = Some(output);
            self.changed.notify_all();
        } else {
            let ready = |s: &super::State| s.groups[group.index].meetings[&sequence].output.is_some();
            state = self.wait(state, rank, Activity::Waiting, ready);
        }
        let meetings = &mut state.groups[group.index].meetings;
        let meeting = meetings.get_mut(&sequence).expect("a meeting stays until all have left");
        let output = meeting.output.clone().expect("a complete meeting has its result");
        meeting.left += 1;
        if meeting.left == here {
            meetings.remove(&sequence);
        }
        drop(state);
        output.downcast().expect("equal records mean equal types")
    }

    /// Brings what the members here bring, waits in the name of `rank`, and returns what the others have brought.
    fn swap(
        &self,
        rank: usize,
        key: MeetingKey,
        processes: Vec<usize>,
        parts: Vec<(Part, Blob)>,
    ) -> Vec<(usize, Blob)> {
        self.bring(key.clone(), processes, parts);
        let state = self.lock();
        let mut state = self.wait(state, rank, Activity::WaitingElsewhere, |s| s.met.contains_key(&key));
        state.met.remove(&key).expect("waited until it was there")
    }
}
