//! Collectives on the host: every member of a group brings an input, all get the same output.

use super::failing::mismatch;
use super::{
    Activity, Blob, Codec, Contribution, GroupId, Member, OpKey, OpRecord, PendingCollective, Shared, World,
    unwrap_shared,
};
use std::sync::Arc;

impl World {
    /// All members bring an `input`; the last one of each process to call runs `combine` on all inputs in group order;
    /// all get its output. `codec` is for inputs of other processes.
    pub(crate) fn run_collective<I, O>(
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
        self.leave_if_failed(&mut state);
        let (sequence, rank, here, record) = {
            let g = &mut state.groups[group.index];
            let sequence = g.called[member];
            g.called[member] += 1;
            let record = OpRecord { name, payload, group: g.label.clone(), sequence };
            (sequence, g.ranks[member], g.here, record)
        };
        state.ranks[rank].last = Some(record.clone());
        let first = state.groups[group.index].pending.get(&sequence).map(|op| op.first.clone());
        if let Some((peer, expected)) = first.filter(|(_, expected)| *expected != record) {
            self.stop(&mut state, rank, mismatch(record, peer, expected));
        }
        let size = state.groups[group.index].ranks.len();
        let op = state.groups[group.index].pending.entry(sequence).or_insert_with(|| PendingCollective {
            first: (rank, record.clone()),
            inputs: (0..size).map(|_| None).collect(),
            contributions: Vec::new(),
            arrived: 0,
            output: None,
            left: 0,
        });
        op.inputs[member] = Some(Arc::new(input));
        op.contributions.extend(bytes.map(|bytes| (Contribution { member, rank, record }, bytes)));
        op.arrived += 1;
        if op.arrived == here {
            let (inputs, contributions) = (std::mem::take(&mut op.inputs), std::mem::take(&mut op.contributions));
            let (label, processes) = {
                let g = &state.groups[group.index];
                (g.label.clone(), g.processes.clone())
            };
            let ranks = state.groups[group.index].ranks.clone();
            drop(state);
            let mut inputs: Vec<Option<I>> =
                inputs.into_iter().map(|input| input.map(|input| unwrap_shared::<I>(input))).collect();
            if group.across {
                let key = OpKey { group: label, sequence };
                for ((member, sender), bytes) in self.gather_others(rank, key, processes, contributions) {
                    let input = match ranks.get(member) == Some(&sender) {
                        true => (codec.decode)(&bytes),
                        false => Err(format!("an input of member {member} of a group of {}", ranks.len())),
                    };
                    inputs[member] = Some(input.unwrap_or_else(|what| self.stop_for(sender, what)));
                }
                if let Some(missing) = inputs.iter().position(Option::is_none) {
                    self.stop_for(ranks[missing], format!("no input of rank {}", ranks[missing]));
                }
            }
            let inputs = inputs.into_iter().map(|input| input.expect("every member has brought its input")).collect();
            let output: Shared = Arc::new(combine(inputs));
            state = self.lock();
            self.leave_if_failed(&mut state);
            for peer in ranks {
                state.ranks[peer].activity = Activity::Running;
            }
            state.groups[group.index].pending.get_mut(&sequence).expect("it stays until all have left").output =
                Some(output);
            self.changed.notify_all();
        } else {
            let ready = |s: &super::State| s.groups[group.index].pending[&sequence].output.is_some();
            state = self.wait(state, rank, Activity::Waiting, ready);
        }
        let pending = &mut state.groups[group.index].pending;
        let op = pending.get_mut(&sequence).expect("it stays until all have left");
        let output = op.output.clone().expect("a complete collective has its output");
        op.left += 1;
        if op.left == here {
            pending.remove(&sequence);
        }
        drop(state);
        output.downcast().expect("equal records mean equal types")
    }

    /// Sends the inputs of the members here, waits in the name of `rank`, and returns the inputs of the others.
    fn gather_others(
        &self,
        rank: usize,
        key: OpKey,
        processes: Vec<usize>,
        contributions: Vec<(Contribution, Blob)>,
    ) -> Vec<(Member, Blob)> {
        self.contribute(key.clone(), processes, contributions);
        let state = self.lock();
        let mut state = self.wait(state, rank, Activity::WaitingElsewhere, |s| s.gathered.contains_key(&key));
        state.gathered.remove(&key).expect("waited until it was there")
    }
}
