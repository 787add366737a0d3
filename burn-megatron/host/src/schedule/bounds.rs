//! The formulas of the papers, against which the simulator is tested. They hold for stages of equal cost and transfers
//! that take no time.

use super::{ScheduleKind, ScheduleSpec, Ticks};

/// The time that every rank does not compute, from the beginning to the end of the last rank, where a formula is
/// known. The arguments are the times of one stage's passes, so of one chunk.
///
/// GPipe, 1F1B and interleaved: `(p - 1)(F + I + W)`. ZB-H1: `(p - 1)(F + I - W)` (arXiv 2401.10241 table 2), a third
/// of it for equal passes; if neither F nor I is shorter than W, from p micro-batches on. ZB-V: `(p - 1) F` for equal
/// passes, from 2p - 1 micro-batches on; the paper's zero counts each rank from its own first to its own last pass,
/// but a step here waits for all ranks.
pub fn bubble(spec: &ScheduleSpec, forward: Ticks, backward_input: Ticks, backward_weight: Ticks) -> Option<Ticks> {
    let before = spec.pipeline_parallel as Ticks - 1;
    let equal = forward == backward_input && forward == backward_weight;
    let enough = |least: usize| spec.micro_batches >= least;
    match spec.kind {
        _ if spec.forward_only => None,
        ScheduleKind::NoPipeline => Some(0),
        ScheduleKind::GPipe | ScheduleKind::OneFOneB | ScheduleKind::Interleaved => {
            Some(before * (forward + backward_input + backward_weight))
        }
        ScheduleKind::ZbH1 => {
            let short = backward_weight <= forward.min(backward_input);
            (short && enough(spec.pipeline_parallel)).then(|| before * (forward + backward_input - backward_weight))
        }
        ScheduleKind::ZbV => (equal && enough(2 * spec.pipeline_parallel - 1)).then(|| before * forward),
    }
}

/// The most activations, each of one chunk and one micro-batch, that a rank holds at once.
///
/// GPipe: all. 1F1B: `p - rank`. Interleaved: one more than its warm-up. ZB-H1: `p`, as the first rank of 1F1B. ZB-V:
/// `2p` of half the size.
pub fn activations(spec: &ScheduleSpec, rank: usize) -> usize {
    let (ranks, chunks) = (spec.pipeline_parallel, spec.virtual_pipeline);
    let most = match spec.kind {
        _ if spec.forward_only => 1,
        ScheduleKind::NoPipeline => 1,
        ScheduleKind::GPipe => spec.micro_batches,
        ScheduleKind::OneFOneB => ranks - rank,
        ScheduleKind::Interleaved => 2 * (ranks - 1 - rank) + (chunks - 1) * spec.group() + 1,
        ScheduleKind::ZbH1 => ranks,
        ScheduleKind::ZbV => 2 * ranks,
    };
    most.min(spec.micro_batches * chunks)
}

/// The most tensors that a rank has received and not used yet; measured on the lists, not from a paper. A large group
/// of the interleaved schedule waits at the first and the last rank.
pub fn received(spec: &ScheduleSpec) -> usize {
    match spec.kind {
        ScheduleKind::NoPipeline => 0,
        ScheduleKind::GPipe | ScheduleKind::OneFOneB | ScheduleKind::ZbH1 => 2,
        ScheduleKind::Interleaved => spec.group() + 1,
        ScheduleKind::ZbV => 3,
    }
}
