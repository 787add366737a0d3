//! Goes through a rank's list of actions and tracks its memory.

use super::RankMemory;
use super::stage::{Peak, StageMemory};
use crate::Job;
use crate::state::States;
use host::schedule::{Action, Pass, Schedule, Work};
use layouts::sizes::gemm_workspace;

pub(super) struct MemoryTracker<'a> {
    chunks: Vec<&'a StageMemory>,
    states: States,
    /// By chunk: gradients of this step exist.
    begun: Vec<bool>,
    activations: u64,
    loss: u64,
    /// A tensor that was sent and is not received yet.
    sent: u64,
    workspace: u64,
    /// What a teacher's forward pass needs.
    teaching: u64,
    /// Activations in host memory, and the most of them.
    host: [u64; 2],
    fullest: RankMemory,
}

impl<'a> MemoryTracker<'a> {
    pub fn new(job: &Job, chunks: Vec<&'a StageMemory>, teaching: u64) -> Self {
        let mut states = States::default();
        chunks.iter().for_each(|chunk| states += chunk.states);
        let local = job.local();
        let sent = if job.layout.pp > 1 { local.stream_tokens * local.hidden * job.element } else { 0 };
        let begun = vec![false; chunks.len()];
        let workspace = if job.gpu { 0 } else { gemm_workspace() };
        Self {
            chunks,
            states,
            begun,
            activations: 0,
            loss: 0,
            sent,
            workspace,
            teaching,
            host: [0; 2],
            fullest: RankMemory::default(),
        }
    }

    /// The peak of a step of `rank`.
    pub fn run(mut self, schedule: &Schedule, rank: usize) -> RankMemory {
        // In a pipeline the teacher is heard before all passes.
        self.note(0, Peak { bytes: self.teaching, ..Peak::default() });
        for action in &schedule.ranks[rank] {
            match action {
                Action::Compute(work) => self.pass(work, !schedule.spec.forward_only),
                Action::ReduceGrads { chunk } => {
                    let stage = self.chunks[*chunk];
                    self.note(0, Peak { communication: stage.reduce, ..Peak::default() });
                    self.states.gradients -= stage.grows();
                }
                Action::Step => {
                    let update = self.chunks.iter().map(|chunk| chunk.update).max().unwrap_or(0);
                    self.note(0, Peak { communication: update, ..Peak::default() });
                }
                Action::Send(_) | Action::Recv(_) => {}
            }
        }
        RankMemory { working: self.fullest.working + self.workspace, host: self.host[1], ..self.fullest }
    }

    fn pass(&mut self, work: &Work, recorded: bool) {
        let stage = self.chunks[work.chunk];
        let (kept, deferred) = (stage.kept(), stage.deferred());
        let grads = matches!(work.pass, Pass::Backward | Pass::BackwardWeight);
        let first = grads && !self.begun[work.chunk];
        self.begun[work.chunk] |= grads;
        // Bytes of the micro-batch before the pass, its peak, and bytes after it.
        let (before, most, after) = match work.pass {
            Pass::Forward => ([0, 0], self.taught(stage), if recorded { kept } else { [0, 0] }),
            Pass::Backward => (kept, stage.backward(false, first), [0, 0]),
            Pass::BackwardInput => (kept, stage.backward(true, false), deferred),
            Pass::BackwardWeight => (deferred, stage.weights(first), [0, 0]),
        };
        match work.pass {
            Pass::Forward if recorded => self.host[0] += stage.host(),
            Pass::Backward | Pass::BackwardInput => self.host[0] -= stage.host(),
            Pass::Forward | Pass::BackwardWeight => {}
        }
        self.host[1] = self.host[1].max(self.host[0]);
        // Tensors that outlive the pass count as saved from its start; the rest is workspace.
        let during = if work.pass == Pass::Forward { after } else { before };
        self.activations = self.activations - before[0] + during[0];
        self.loss = self.loss - before[1] + during[1];
        let own = during[0] + during[1];
        if most.bytes >= own {
            self.note(own, most);
        } else {
            // By then some saved tensors are freed.
            let (activations, loss) = (self.activations, self.loss);
            let gone = own - most.bytes;
            self.loss -= gone.min(during[1]);
            self.activations -= gone - gone.min(during[1]);
            self.note(most.bytes, most);
            (self.activations, self.loss) = (activations, loss);
        }
        self.activations = self.activations - during[0] + after[0];
        self.loss = self.loss - during[1] + after[1];
        self.states.gradients += if first { stage.grows() } else { 0 };
    }

    /// The peak of a forward pass, before which the head's stage hears the teacher.
    fn taught(&self, stage: &StageMemory) -> Peak {
        let teaching = if stage.has_head() { self.teaching } else { 0 };
        stage.forward().max(Peak { bytes: teaching, ..Peak::default() })
    }

    /// Records a moment, of which `own` bytes are already counted as saved.
    fn note(&mut self, own: u64, peak: Peak) {
        let mut states = self.states;
        states.gradients += peak.grown;
        let now = RankMemory {
            states,
            activations: self.activations,
            loss: self.loss,
            working: peak.bytes - own,
            communication: peak.communication + self.sent,
            ..RankMemory::default()
        };
        if now.peak() > self.fullest.peak() {
            self.fullest = now;
        }
    }
}
