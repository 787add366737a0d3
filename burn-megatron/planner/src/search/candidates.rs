//! All legal layouts of a model and a global batch on a number of GPUs.

use layouts::mesh::ParallelLayout;
use layouts::recompute::{Module, Recompute};

use super::{PASSES, SearchRequest};
use crate::{Decoder, Job};
use host::batch::{BatchPlan, BatchSizes};
use host::schedule::stages::{PartCosts, Split, StageLayout};
use host::schedule::{Placement, ScheduleKind, ScheduleSpec};

/// Every legal layout, or as soon as there are `enough` of them some.
pub(super) fn candidates(request: &SearchRequest, enough: usize) -> Vec<Job> {
    let (job, decoder, gpus) = (request.job, &request.job.decoder, request.gpus);
    let sizes = job.batch_sizes();
    let mut stages = StageLayouts::new(job);
    let mut found = Vec::new();
    for tp in divisors(gpus, request.hardware.host) {
        for pp in divisors(gpus / tp, decoder.layers) {
            for cp in divisors(gpus / tp / pp, job.seq) {
                let dp = gpus / tp / pp / cp;
                if BatchPlan::at(&sizes, 0, 1, dp).is_err() {
                    continue;
                }
                for sp in [false, true].into_iter().filter(|sp| !sp || tp > 1) {
                    for vpp in [1, 2, 4, 8].into_iter().filter(|vpp| *vpp == 1 || pp > 1 && pp * vpp <= decoder.layers)
                    {
                        for (ep, etp) in expert_sizes(decoder, tp, cp * dp) {
                            let layout = ParallelLayout { tp, cp, ep, etp, pp, vpp, dp, sp, zero: 0, zero_group: None };
                            if (request.legal)(&layout) {
                                variants(request, layout, &mut stages, &mut found);
                            }
                            if found.len() >= enough {
                                return found;
                            }
                        }
                    }
                }
            }
        }
    }
    found
}

/// The divisors of `n` up to `most`.
fn divisors(n: usize, most: usize) -> impl Iterator<Item = usize> {
    (1..=n.min(most)).filter(move |divisor| n.is_multiple_of(*divisor))
}

/// Expert-parallel sizes, and tensor-parallel sizes of an expert: that of the rest of the layer, or 1. `ranks` share a
/// stage and have the same tensor-parallel rank.
fn expert_sizes(decoder: &Decoder, tp: usize, ranks: usize) -> Vec<(usize, Option<usize>)> {
    let Some(experts) = &decoder.experts else { return vec![(1, None)] };
    let sizes = |etp: usize| {
        let ranks = tp * ranks / etp;
        divisors(ranks, experts.count).filter(|ep| experts.count.is_multiple_of(*ep))
    };
    let sharded = sizes(tp).map(|ep| (ep, None));
    let whole = sizes(1).filter(|_| tp > 1).map(|ep| (ep, Some(1)));
    sharded.chain(whole).collect()
}

/// A layout with every micro-batch, schedule, ZeRO stage and recomputation.
fn variants(request: &SearchRequest, layout: ParallelLayout, stage_layouts: &mut StageLayouts, found: &mut Vec<Job>) {
    let selective = Recompute::selective(&[Module::CoreAttention, Module::MlpActivation, Module::Norms]);
    let full = Recompute::full();
    let all_but_attention = Recompute { keep_attention: true, ..full.clone() };
    let offloaded = Recompute { cpu_offload: true, ..full.clone() };
    let recomputes = [Recompute::default(), selective, all_but_attention, full, offloaded];
    // What was asked for is compared too, also if it is no power of two.
    let mut sizes = vec![1, 2, 4, 8, 16];
    if !sizes.contains(&request.job.micro_batch) {
        sizes.push(request.job.micro_batch);
    }
    let sizes = request.micro_batch.map_or(sizes, |size| vec![size]);
    let most = if layout.dp * layout.cp > 1 { 3 } else { 0 };
    let stages = request.zero.map_or(0..=most, |zero| zero.min(most)..=zero.min(most));
    let with = |zero: u8| {
        let zero_group = request.job.layout.zero_group.filter(|_| zero > 0);
        Some(ParallelLayout { zero, zero_group, ..layout.clone() }).filter(|layout| layout.check().is_ok())
    };
    let layouts: Vec<ParallelLayout> = stages.filter_map(with).collect();
    let batches = request.job.batch_sizes();
    for micro_batch in sizes.into_iter().filter(|size| BatchPlan::at(&batches, 0, *size, layout.dp).is_ok()) {
        for spec in schedules(&layout, &batches, micro_batch) {
            if spec.placement().stages().saturating_mul(spec.micro_batches) > PASSES {
                continue;
            }
            for layers in stage_layouts.of(spec.placement()) {
                for layout in &layouts {
                    for recompute in &recomputes {
                        found.push(Job {
                            layout: layout.clone(),
                            schedule: spec,
                            passes: None,
                            stages: layers.clone(),
                            micro_batch,
                            recompute: recompute.clone(),
                            decoder: request.job.decoder.clone(),
                            fp8: request.job.fp8.clone(),
                            dynamic: None,
                            post_training: request.job.post_training.clone(),
                            ..*request.job
                        });
                    }
                }
            }
        }
    }
}

/// The schedules that have the micro-batches of every step, also while the batch grows.
fn schedules(layout: &ParallelLayout, batches: &BatchSizes, micro_batch: usize) -> Vec<ScheduleSpec> {
    use ScheduleKind::{Interleaved, NoPipeline, OneFOneB, ZbH1, ZbV};
    let kinds: &[ScheduleKind] = match (layout.pp, layout.vpp) {
        (1, _) => &[NoPipeline],
        (_, 1) => &[OneFOneB, ZbH1],
        (_, 2) => &[Interleaved, ZbV],
        _ => &[Interleaved],
    };
    let unit = micro_batch * layout.dp;
    let spec = |kind: &ScheduleKind| {
        let spec = ScheduleSpec::new(*kind, layout.pp, batches.global / unit);
        ScheduleSpec { virtual_pipeline: layout.vpp, ..spec }
    };
    let exists = |spec: &ScheduleSpec| {
        batches.all().all(|size| ScheduleSpec { micro_batches: size / unit, ..*spec }.check().is_ok())
    };
    kinds.iter().map(spec).filter(exists).collect()
}

/// Stage layouts of a model: stages with equally many layers if the layers allow it, and stages with equal costs.
struct StageLayouts {
    costs: PartCosts,
    known: Vec<(Placement, Vec<StageLayout>)>,
}

impl StageLayouts {
    fn new(job: &Job) -> Self {
        Self { costs: job.decoder.part_costs(job.seq), known: Vec::new() }
    }

    fn of(&mut self, placement: Placement) -> &[StageLayout] {
        let index = self.known.iter().position(|(known, _)| *known == placement).unwrap_or_else(|| {
            let equal = Split::equal(self.costs.layers.len(), placement).layout();
            let by_cost = (placement.ranks() > 1).then(|| StageLayout::by_cost(&self.costs, placement));
            let mut found: Vec<_> = equal.into_iter().chain(by_cost.flatten()).collect();
            found.dedup();
            self.known.push((placement, found));
            self.known.len() - 1
        });
        &self.known[index].1
    }
}
