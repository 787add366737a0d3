//! Time of a unit's passes, operation by operation.

use super::super::Job;
use super::super::collective::Collective;
use super::super::gpus::Hardware;
use super::super::operations::{Communication, Op, Over, Unit};

/// Seconds of one pass of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassTime {
    pub compute: f64,
    pub recompute: f64,
    pub memory: f64,
    pub communication: f64,
    pub experts: f64,
}

impl PassTime {
    pub fn total(&self) -> f64 {
        self.compute + self.recompute + self.memory + self.communication + self.experts
    }

    pub fn add(&mut self, other: PassTime) {
        self.compute += other.compute;
        self.recompute += other.recompute;
        self.memory += other.memory;
        self.communication += other.communication;
        self.experts += other.experts;
    }

    pub fn divided(self, by: f64) -> PassTime {
        let Self { compute, recompute, memory, communication, experts } = self;
        PassTime {
            compute: compute / by,
            recompute: recompute / by,
            memory: memory / by,
            communication: communication / by,
            experts: experts / by,
        }
    }

    fn send(&mut self, over: Over, seconds: f64) {
        *(if over == Over::Experts { &mut self.experts } else { &mut self.communication }) += seconds;
    }
}

pub(super) struct CostModel<'a> {
    pub job: &'a Job,
    pub hardware: &'a Hardware,
}

impl CostModel<'_> {
    fn communication(&self, communication: &Communication, collective: Option<Collective>) -> f64 {
        let Some(collective) = collective else { return 0.0 };
        let (ranks, stride) = self.job.ranks(communication.over);
        let rates = &self.hardware.model.steps;
        let reached = if collective == Collective::AllToAll { rates.all_to_all } else { 1.0 };
        let bytes = collective.sent(communication.bytes, ranks) as f64;
        bytes / (reached * self.hardware.between(ranks, stride)) + rates.latency
    }

    fn moving(&self, bytes: u64) -> f64 {
        bytes as f64 / self.hardware.bandwidth
    }

    /// An operation at the rate of its arithmetic or its memory traffic, whichever is slower. `pass` is the index
    /// of its FLOPs.
    fn roofline(&self, op: &Op, pass: usize, bytes: u64, again: bool) -> PassTime {
        let rates = &self.hardware.model.steps;
        let rate = match (op.attention, op.fp8) {
            (true, _) => self.hardware.attention(self.job.decoder.head_dim)[pass.min(1)],
            (false, None) => self.hardware.gemms,
            (false, Some(_)) if self.job.fp8_blocks => rates.fp8_blocks * self.hardware.gemms,
            (false, Some(_)) => rates.fp8 * self.hardware.gemms,
        };
        let (arithmetic, moving) = (op.flops[pass] / rate, self.moving(bytes));
        let mut time = PassTime { memory: (moving - arithmetic).max(0.0), ..PassTime::default() };
        *(if again { &mut time.recompute } else { &mut time.compute }) = arithmetic;
        time
    }

    /// Seconds of an FP8 cast of a tensor of `bytes`.
    fn cast(&self, op: &Op, bytes: u64) -> f64 {
        if op.fp8.is_some() { self.moving(bytes / self.job.element * self.moved_by_cast()) } else { 0.0 }
    }

    /// Bytes that the cast of a number moves: it is read for its amax, unless blocks have their own, read again, and written in
    /// FP8 as it is and transposed.
    fn moved_by_cast(&self) -> u64 {
        if self.job.fp8_blocks { self.job.element + 2 } else { 2 * self.job.element + 2 }
    }

    /// Bytes that the casts of a weight move once per step, if its FP8 copies are kept until the update.
    pub fn quantised_once(&self, op: &Op) -> u64 {
        if self.saves_quantised() && op.fp8.is_some() { op.matrix * self.moved_by_cast() } else { 0 }
    }

    fn saves_quantised(&self) -> bool {
        self.job.fp8_weights && self.job.layout.zero < 3
    }

    /// Seconds of accumulating a weight's gradient in fp32: the first micro-batch writes, the others also read. GEMMs
    /// do that in their epilogue, where nothing hides it.
    fn accumulation(&self, op: &Op) -> f64 {
        let times = 2.0 - 1.0 / self.job.schedule.micro_batches as f64;
        if self.job.gpu { times * self.moving(op.matrix * self.job.wide()) } else { 0.0 }
    }

    pub fn unit(&self, unit: &Unit) -> [PassTime; 3] {
        let mut passes = [PassTime::default(); 3];
        for op in &unit.ops {
            self.operation(op, unit, &mut passes);
        }
        self.overlap_with_gemms(unit, &mut passes);
        self.overlap_with_experts(unit, &mut passes);
        if unit.constant { [passes[0], PassTime::default(), PassTime::default()] } else { passes }
    }

    /// Tensor-parallel communication by DMA copy engines overlaps with GEMMs. The local shard, which needs no
    /// communication, is multiplied meanwhile. In the backward pass of a layer that gathers its input, the reduction
    /// overlaps with the weight's gradient, and gathering the input again with the input's gradient.
    fn overlap_with_gemms(&self, unit: &Unit, passes: &mut [PassTime; 3]) {
        let tp = self.job.layout.tp;
        if !self.job.gpu || !self.hardware.overlap || tp < 2 || tp > self.hardware.host {
            return;
        }
        let carried =
            |op: &Op| op.communication.filter(|e| e.over == Over::Tensor && self.job.layout.sequence_parallel());
        let multiplied = |op: &Op| op.linear && op.fp8.is_none();
        for pair in unit.ops.windows(2) {
            let (communication, gemm, gathers) = match (carried(&pair[0]), carried(&pair[1])) {
                (Some(communication), None) if multiplied(&pair[1]) => (communication, &pair[1], true),
                (None, Some(communication)) if multiplied(&pair[0]) => (communication, &pair[0], false),
                _ => continue,
            };
            let takes = |collective| self.communication(&communication, collective);
            let computes = |pass: usize| self.roofline(gemm, pass, 0, false).compute;
            let others = 1.0 - 1.0 / tp as f64;
            let mut overlap = |pass: usize, seconds: f64, compute: f64| {
                let seen = (seconds / self.hardware.model.steps.dma_copy - compute).max(0.0);
                passes[pass].send(Over::Tensor, seen - seconds);
            };
            overlap(0, takes(communication.forward), others * computes(0));
            if unit.recomputed {
                overlap(1, takes(communication.forward), others * computes(0));
            }
            overlap(1, takes(communication.backward), if gathers { computes(2) } else { others * computes(1) });
            if communication.again {
                overlap(2, takes(communication.forward), computes(1));
            }
        }
    }

    fn operation(&self, op: &Op, unit: &Unit, passes: &mut [PassTime; 3]) {
        let stays = op.output.id == op.input.id;
        let moved = if stays { 0 } else { op.input.bytes + op.output.bytes + op.weight * self.job.element };
        // The input's gradient is computed from the output's gradient and the saved tensors.
        let kept: u64 = op.saves.iter().map(|kept| kept.bytes).sum();
        let moved_back = if stays || op.flops[1] > 0.0 { moved } else { op.input.bytes + op.output.bytes + kept };
        let communication = op.communication.as_ref();
        let seconds = |collective: fn(&Communication) -> Option<Collective>| {
            communication.map_or(0.0, |communication| self.communication(communication, collective(communication)))
        };
        let (sent, returned) = (seconds(|e| e.forward), seconds(|e| e.backward));
        let over = communication.map_or(Over::Tensor, |communication| communication.over);
        // Tokens for experts, and positions for heads, are permuted in addition to their communication; other tensors are
        // sent as they are.
        let alone = communication.is_some() && over == Over::Tensor;
        let local = |time: PassTime| if alone { PassTime::default() } else { time };
        passes[0].add(local(self.roofline(op, 0, moved, false)));
        passes[0].memory += self.cast(op, op.input.bytes);
        passes[0].send(over, sent);
        passes[1].add(local(self.roofline(op, 1, moved_back, false)));
        passes[1].memory += self.cast(op, op.output.bytes);
        passes[1].send(over, returned);
        if op.flops[2] > 0.0 {
            passes[2].add(self.roofline(op, 2, moved, false));
            passes[2].memory += self.accumulation(op);
        }
        if !self.saves_quantised() {
            let weight = self.cast(op, op.matrix * self.job.element);
            passes[0].memory += weight;
            passes[1].memory += weight;
        }
        if unit.repeats(op) {
            passes[1].add(local(self.roofline(op, 0, moved, true)));
            passes[1].recompute += self.cast(op, op.input.bytes);
        }
        if unit.recomputed && unit.repeats(op) {
            passes[1].send(over, sent);
        }
        if let Some(communication) = communication.filter(|communication| communication.again) {
            passes[if over == Over::Context { 1 } else { 2 }].send(communication.over, sent);
        }
    }

    /// The host's part of routing, and all-to-alls of tokens that overlap with the experts chunk by chunk.
    fn overlap_with_experts(&self, unit: &Unit, passes: &mut [PassTime; 3]) {
        let Some(experts) = self.job.decoder.experts.as_ref().filter(|_| self.job.gpu) else { return };
        let gemms = |op: &&Op| op.expert && op.linear;
        let layers = unit.ops.iter().filter(gemms).count() as f64 / 2.0;
        if layers == 0.0 {
            return;
        }
        let rates = &self.hardware.model.steps;
        // Shared experts are queued when the host begins to wait.
        let local = self.job.local();
        let shared = 6.0 * (local.tokens * local.experts.shared * local.hidden) as f64 / self.hardware.gemms;
        let waits = layers * (rates.expert_counts_wait - shared).max(0.0);
        passes[0].experts += waits;
        if unit.recomputed {
            passes[1].experts += waits;
        }
        let pieces = self.job.chunks_of_experts(experts);
        if pieces < 2 || !self.hardware.overlap {
            return;
        }
        let seconds = |op: &Op, pass: usize| self.roofline(op, pass, 0, false).compute;
        let of = |pass: usize| unit.ops.iter().filter(gemms).map(|op| seconds(op, pass)).sum::<f64>() / layers;
        let (forward, backward) = (of(0), of(1) + of(2));
        let there = |op: &Op| {
            op.communication.filter(|e| e.over == Over::Experts).map_or(0.0, |e| self.communication(&e, e.forward))
        };
        let way = unit.ops.iter().map(there).sum::<f64>() / layers / 2.0;
        let saved = |compute: f64| {
            let hidden = 2.0 * way + compute - chunked(way, compute, pieces);
            layers * hidden * rates.overlapped_gemm
        };
        passes[0].experts -= saved(forward);
        passes[1].experts -= saved(backward) + if unit.recomputed { saved(forward) } else { 0.0 };
    }
}

/// Seconds of dispatching tokens, computing experts and combining, with `way` seconds for one direction, in chunks
/// of which each is sent while another is computed.
fn chunked(way: f64, compute: f64, pieces: usize) -> f64 {
    let (way, compute) = (way / pieces as f64, compute / pieces as f64);
    let mut computed = 0.0f64;
    let mut back = way * pieces as f64;
    for piece in 1..=pieces {
        computed = computed.max(way * piece as f64) + compute;
        back = back.max(computed) + way;
    }
    back
}

#[cfg(test)]
mod tests {
    use super::chunked;

    #[test]
    fn pieces_hide_what_runs_beside() {
        assert_eq!(chunked(2.0, 6.0, 1), 10.0);
        // The dispatch of the first chunk and the combine of the last are exposed.
        assert_eq!(chunked(2.0, 6.0, 2), 8.0);
        assert_eq!(chunked(8.0, 2.0, 2), 16.0);
    }
}
