//! How long a unit's passes take, operation by operation.

use super::super::Job;
use super::super::gpus::{BESIDE, COPIES, COUNTS, FP8, Hardware, LATENCY, PRODUCT, ROUTED};
use super::super::operations::{Exchange, Op, Over, Unit};
use super::super::traffic::Collective;

/// Seconds of one pass of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PassTime {
    pub compute: f64,
    pub recompute: f64,
    pub memory: f64,
    pub exchange: f64,
    pub experts: f64,
}

impl PassTime {
    pub fn total(&self) -> f64 {
        self.compute + self.recompute + self.memory + self.exchange + self.experts
    }

    pub fn add(&mut self, other: PassTime) {
        self.compute += other.compute;
        self.recompute += other.recompute;
        self.memory += other.memory;
        self.exchange += other.exchange;
        self.experts += other.experts;
    }

    fn send(&mut self, over: Over, seconds: f64) {
        *(if over == Over::Experts { &mut self.experts } else { &mut self.exchange }) += seconds;
    }
}

pub(super) struct Clock<'a> {
    pub job: &'a Job,
    pub hardware: &'a Hardware,
}

impl Clock<'_> {
    fn exchange(&self, exchange: &Exchange, collective: Option<Collective>) -> f64 {
        let Some(collective) = collective else { return 0.0 };
        let (ranks, stride) = self.job.ranks(exchange.over);
        let reached = if collective == Collective::AllToAll { ROUTED } else { 1.0 };
        collective.sent(exchange.bytes, ranks) as f64 / (reached * self.hardware.between(ranks, stride)) + LATENCY
    }

    fn moving(&self, bytes: u64) -> f64 {
        bytes as f64 / self.hardware.bandwidth
    }

    /// An operation at the rate of its arithmetic or of its memory traffic, whichever is slower; `pass` is the index of
    /// the FLOPs.
    fn roofline(&self, op: &Op, pass: usize, bytes: u64, again: bool) -> PassTime {
        let rate = match (op.attention, op.fp8) {
            (true, _) => self.hardware.attention(self.job.decoder.head_dim)[pass.min(1)],
            (false, None) => self.hardware.products,
            (false, Some(_)) => FP8 * self.hardware.products,
        };
        let (arithmetic, moving) = (op.flops[pass] / rate + self.apart(op) as f64 * PRODUCT, self.moving(bytes));
        let mut time = PassTime { memory: (moving - arithmetic).max(0.0), ..PassTime::default() };
        *(if again { &mut time.recompute } else { &mut time.compute }) = arithmetic;
        time
    }

    /// Products of experts that are launched one by one: in FP8 each has its scales.
    fn apart(&self, op: &Op) -> u64 {
        let is_apart = self.job.gpu && op.expert && op.fp8.is_some();
        if is_apart { self.job.share().experts.count * self.job.meeting() } else { 0 }
    }

    /// What a product in FP8 takes besides: of a tensor of `bytes` the largest magnitude is looked for, it is read
    /// again and written in bytes, as it lies and transposed.
    fn cast(&self, op: &Op, bytes: u64) -> f64 {
        if op.fp8.is_some() { self.moving(bytes / self.job.element * (2 * self.job.element + 2)) } else { 0.0 }
    }

    /// Bytes that the casts of a weight move once in a step, if it is kept in FP8 until the update.
    pub fn quantised_once(&self, op: &Op) -> u64 {
        if self.keeps_quantised() && op.fp8.is_some() { op.matrix * (2 * self.job.element + 2) } else { 0 }
    }

    fn keeps_quantised(&self) -> bool {
        self.job.fp8_weights && self.job.layout.zero < 3
    }

    /// A weight's gradient is added up in wide numbers: the first micro-batch writes them, others read them too, in FP8
    /// also those that meet at an expert. Products do that at their end, when nothing is left to hide it.
    fn added_up(&self, op: &Op) -> f64 {
        let products = if op.expert && op.fp8.is_some() { self.job.meeting() } else { 1 };
        let times = 2.0 * products as f64 - 1.0 / self.job.schedule.micro_batches as f64;
        if self.job.gpu { times * self.moving(op.matrix * self.job.wide()) } else { 0.0 }
    }

    pub fn unit(&self, unit: &Unit) -> [PassTime; 3] {
        let mut passes = [PassTime::default(); 3];
        for op in &unit.ops {
            self.operation(op, unit, &mut passes);
        }
        self.beside_products(unit, &mut passes);
        self.beside_experts(unit, &mut passes);
        passes
    }

    /// What copy engines exchange beside products of tensor parallelism (backend-dist/src/ops/cuda/copied.rs). A rank's
    /// own part, which needs no exchange, is multiplied meanwhile; in the backward pass of a layer that gathers its
    /// input the sum runs beside the weight's gradient, and the input comes again beside the input's gradient.
    fn beside_products(&self, unit: &Unit, passes: &mut [PassTime; 3]) {
        let tp = self.job.layout.tp;
        if !self.job.gpu || !self.hardware.overlap || tp < 2 || tp > self.hardware.host {
            return;
        }
        let carried = |op: &Op| op.exchange.filter(|e| e.over == Over::Tensor && self.job.layout.sequence_parallel());
        let multiplied = |op: &Op| op.linear && op.fp8.is_none();
        for pair in unit.ops.windows(2) {
            let (exchange, product, gathers) = match (carried(&pair[0]), carried(&pair[1])) {
                (Some(exchange), None) if multiplied(&pair[1]) => (exchange, &pair[1], true),
                (None, Some(exchange)) if multiplied(&pair[0]) => (exchange, &pair[0], false),
                _ => continue,
            };
            let takes = |collective| self.exchange(&exchange, collective);
            let computes = |pass: usize| self.roofline(product, pass, 0, false).compute;
            let others = 1.0 - 1.0 / tp as f64;
            let mut beside = |pass: usize, seconds: f64, compute: f64| {
                let seen = (seconds / COPIES - compute).max(0.0);
                passes[pass].send(Over::Tensor, seen - seconds);
            };
            beside(0, takes(exchange.forward), others * computes(0));
            if unit.recomputed {
                beside(1, takes(exchange.forward), others * computes(0));
            }
            beside(1, takes(exchange.backward), if gathers { computes(2) } else { others * computes(1) });
            if exchange.again {
                beside(2, takes(exchange.forward), computes(1));
            }
        }
    }

    fn operation(&self, op: &Op, unit: &Unit, passes: &mut [PassTime; 3]) {
        let stays = op.output.id == op.input.id;
        let moved = if stays { 0 } else { op.input.bytes + op.output.bytes + op.weight * self.job.element };
        // Of the output's gradient and what was kept the input's gradient is made.
        let kept: u64 = op.keeps.iter().map(|kept| kept.bytes).sum();
        let moved_back = if stays || op.flops[1] > 0.0 { moved } else { op.input.bytes + op.output.bytes + kept };
        let exchange = op.exchange.as_ref();
        let seconds = |collective: fn(&Exchange) -> Option<Collective>| {
            exchange.map_or(0.0, |exchange| self.exchange(exchange, collective(exchange)))
        };
        let (sent, returned) = (seconds(|e| e.forward), seconds(|e| e.backward));
        let over = exchange.map_or(Over::Tensor, |exchange| exchange.over);
        // Rows for experts are put in order beside their exchange, other tensors are exchanged as they lie.
        let alone = exchange.is_some() && !op.attention && over != Over::Experts;
        let local = |time: PassTime| if alone { PassTime::default() } else { time };
        passes[0].add(local(self.roofline(op, 0, moved, false)));
        passes[0].memory += self.cast(op, op.input.bytes);
        passes[0].send(over, sent);
        passes[1].add(local(self.roofline(op, 1, moved_back, false)));
        passes[1].memory += self.cast(op, op.output.bytes);
        passes[1].send(over, returned);
        if op.flops[2] > 0.0 {
            passes[2].add(self.roofline(op, 2, moved, false));
            passes[2].memory += self.added_up(op);
        }
        if !self.keeps_quantised() {
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
        if let Some(exchange) = exchange.filter(|exchange| exchange.again) {
            passes[if over == Over::Context { 1 } else { 2 }].send(exchange.over, sent);
        }
    }

    /// The host's part in routing, and exchanges of tokens that run beside the experts piece by piece
    /// (backend-dist/src/ops/moe/journey.rs).
    fn beside_experts(&self, unit: &Unit, passes: &mut [PassTime; 3]) {
        let Some(experts) = self.job.decoder.experts.as_ref().filter(|_| self.job.gpu) else { return };
        let products = |op: &&Op| op.expert && op.linear;
        let layers = unit.ops.iter().filter(products).count() as f64 / 2.0;
        if layers == 0.0 {
            return;
        }
        // Shared experts are on their way when the host begins to wait.
        let share = self.job.share();
        let shared = 6.0 * (share.tokens * share.experts.shared * share.hidden) as f64 / self.hardware.products;
        let waits = layers * (COUNTS - shared).max(0.0);
        passes[0].experts += waits;
        if unit.recomputed {
            passes[1].experts += waits;
        }
        let pieces = self.job.pieces_of_experts(experts);
        if pieces < 2 || !self.hardware.overlap {
            return;
        }
        let seconds = |op: &Op, pass: usize| self.roofline(op, pass, 0, false).compute;
        let of = |pass: usize| unit.ops.iter().filter(products).map(|op| seconds(op, pass)).sum::<f64>() / layers;
        let (forward, backward) = (of(0), of(1) + of(2));
        let there =
            |op: &Op| op.exchange.filter(|e| e.over == Over::Experts).map_or(0.0, |e| self.exchange(&e, e.forward));
        let way = unit.ops.iter().map(there).sum::<f64>() / layers / 2.0;
        let saved = |compute: f64| {
            let hidden = 2.0 * way + compute - in_pieces(way, compute, pieces);
            layers * hidden * BESIDE
        };
        passes[0].experts -= saved(forward);
        passes[1].experts -= saved(backward) + if unit.recomputed { saved(forward) } else { 0.0 };
    }
}

/// Seconds of rows on their way to experts, computed and on their way back, `way` for one way of all, in pieces of
/// which each is sent beside what is computed of another.
fn in_pieces(way: f64, compute: f64, pieces: usize) -> f64 {
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
    use super::in_pieces;

    #[test]
    fn pieces_hide_what_runs_beside() {
        assert_eq!(in_pieces(2.0, 6.0, 1), 10.0);
        // The first piece's way there and the last one's way back are seen.
        assert_eq!(in_pieces(2.0, 6.0, 2), 8.0);
        assert_eq!(in_pieces(8.0, 2.0, 2), 16.0);
    }
}
