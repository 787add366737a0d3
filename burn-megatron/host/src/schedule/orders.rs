//! The order of the passes on each rank, one function per schedule.

use super::{Pass, ScheduleKind, ScheduleSpec, Work};

/// The passes of every rank, in order.
pub(super) fn passes(spec: &ScheduleSpec) -> Vec<Vec<Work>> {
    let mut lists: Vec<Vec<Work>> = (0..spec.pipeline_parallel).map(|rank| rank_passes(spec, rank)).collect();
    if spec.forward_only {
        lists.iter_mut().for_each(|list| list.retain(|work| work.pass == Pass::Forward));
    }
    lists
}

/// GPipe's passes over any number of chunks per rank.
pub(super) fn all_forward_all_backward(spec: &ScheduleSpec) -> Vec<Vec<Work>> {
    vec![one_forward_one_backward(spec, spec.micro_batches * spec.virtual_pipeline); spec.pipeline_parallel]
}

/// The numbers of warm-up passes are Megatron-LM's: `get_pp_rank_microbatches` in
/// megatron/core/pipeline_parallel/schedules.py.
fn rank_passes(spec: &ScheduleSpec, rank: usize) -> Vec<Work> {
    let after = spec.pipeline_parallel - 1 - rank;
    match spec.kind {
        ScheduleKind::NoPipeline => one_forward_one_backward(spec, 0),
        ScheduleKind::GPipe => one_forward_one_backward(spec, spec.micro_batches),
        ScheduleKind::OneFOneB => one_forward_one_backward(spec, after),
        ScheduleKind::Interleaved => {
            one_forward_one_backward(spec, 2 * after + (spec.virtual_pipeline - 1) * spec.group())
        }
        ScheduleKind::ZbH1 => delay_weights(&one_forward_one_backward(spec, after), rank),
        ScheduleKind::ZbV => zb_v(rank, spec.pipeline_parallel, spec.micro_batches),
    }
}

/// `warm_up` forwards (or all, if there are fewer), then a forward and a backward in turn, then the backwards that are
/// left. With a warm-up of nothing that is no pipeline, with one of everything GPipe.
fn one_forward_one_backward(spec: &ScheduleSpec, warm_up: usize) -> Vec<Work> {
    let chunks = spec.virtual_pipeline;
    let turns = turns(spec.micro_batches, chunks, spec.group());
    let forward = |&(chunk, micro_batch): &(usize, usize)| Work { pass: Pass::Forward, chunk, micro_batch };
    let backward =
        |&(chunk, micro_batch): &(usize, usize)| Work { pass: Pass::Backward, chunk: chunks - 1 - chunk, micro_batch };
    let (early, steady) = turns.split_at(warm_up.min(turns.len()));
    let (paired, late) = turns.split_at(steady.len());
    let pairs = steady.iter().zip(paired).flat_map(|(f, b)| [forward(f), backward(b)]);
    early.iter().map(forward).chain(pairs).chain(late.iter().map(backward)).collect()
}

/// (chunk, micro-batch) in the order of the forward passes: each group of micro-batches through all chunks, then the
/// next group. `get_schedule_table` in Megatron-LM's schedules.py.
fn turns(micro_batches: usize, chunks: usize, group: usize) -> Vec<(usize, usize)> {
    let groups = (0..micro_batches).step_by(group).map(|first| first..(first + group).min(micro_batches));
    groups
        .flat_map(|group| (0..chunks).flat_map(move |chunk| group.clone().map(move |micro_batch| (chunk, micro_batch))))
        .collect()
}

/// Splits every backward and runs its weight half `delay` backwards later, the last ones at the end.
///
/// ZB-H1 is 1F1B with a delay of `rank`: all ranks then hold the activations of the same number of micro-batches, the
/// input gradients arrive earlier by a weight pass per rank, and the weight passes fill the end of the step.
fn delay_weights(list: &[Work], delay: usize) -> Vec<Work> {
    let weights: Vec<Work> = list
        .iter()
        .filter(|work| work.pass == Pass::Backward)
        .map(|&work| Work { pass: Pass::BackwardWeight, ..work })
        .collect();
    let mut split = Vec::with_capacity(list.len() + weights.len());
    let mut backwards = 0;
    for &work in list {
        if work.pass == Pass::Backward {
            split.push(Work { pass: Pass::BackwardInput, ..work });
            backwards += 1;
            if backwards > delay {
                split.push(weights[backwards - 1 - delay]);
            }
        } else {
            split.push(work);
        }
    }
    split.extend(&weights[weights.len() - delay.min(weights.len())..]);
    split
}

/// ZB-V for passes of equal length: warm-up fills the V so that both chunks of a rank advance in turn, one forward,
/// input and weight pass each; weight passes that would delay input gradients at the end come last.
///
/// The pattern needs 2p - 1 micro-batches; with fewer it is that of 2p - 1 without those that do not exist.
fn zb_v(rank: usize, ranks: usize, micro_batches: usize) -> Vec<Work> {
    let mut list = Emitter { counts: [[0; 4]; 2], list: Vec::new(), micro_batches };
    let total = micro_batches.max(2 * ranks - 1);
    let after = ranks - rank;
    use Pass::{BackwardInput, BackwardWeight, Forward};

    list.repeat(2 * after - 1, &[(Forward, 0)]);
    list.repeat(rank, &[(Forward, 1), (Forward, 0)]);
    list.repeat(after, &[(Forward, 1), (BackwardInput, 1), (BackwardWeight, 1)]);
    // So far: 2p - r - 1 forwards in the first chunk, p in the second.
    let first_left = total - (2 * ranks - rank - 1);
    for turn in 0..total - ranks {
        if turn < first_left {
            list.repeat(1, &[(Forward, 0)]);
        }
        list.repeat(1, &[(BackwardInput, 0), (BackwardWeight, 0)]);
        list.repeat(1, &[(Forward, 1), (BackwardInput, 1), (BackwardWeight, 1)]);
    }
    list.repeat(rank, &[(BackwardInput, 0), (BackwardInput, 1)]);
    list.repeat(after, &[(BackwardInput, 0), (BackwardWeight, 0)]);
    list.repeat(rank, &[(BackwardWeight, 1)]);
    list.repeat(rank, &[(BackwardWeight, 0)]);
    list.list
}

/// Counts the passes of each kind and chunk, and leaves out those of micro-batches that do not exist.
struct Emitter {
    counts: [[usize; 4]; 2],
    list: Vec<Work>,
    micro_batches: usize,
}

impl Emitter {
    fn repeat(&mut self, times: usize, pattern: &[(Pass, usize)]) {
        for &(pass, chunk) in std::iter::repeat_n(pattern, times).flatten() {
            let count = &mut self.counts[chunk][pass as usize];
            if *count < self.micro_batches {
                self.list.push(Work { pass, chunk, micro_batch: *count });
            }
            *count += 1;
        }
    }
}
