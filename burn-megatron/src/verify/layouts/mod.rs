//! Which layouts to try. Pure.

use super::Candidate;
use super::candidate::{MODULES, full};
use super::pairs::{Options, cover};
use crate::engine::{CommWord, ContextConfig};
use crate::schedule::stages::StageLayout;
use crate::schedule::{PipelineConfig, ScheduleKind};
use backend_dist::mesh::ParallelLayout;
use models::recompute::{Method, Recompute};

/// What layouts of the same sizes choose from.
struct Shape {
    /// With all layouts of the experts.
    layouts: Vec<ParallelLayout>,
    /// How attention is computed over context parallel ranks.
    contexts: Vec<ContextConfig>,
    /// Schedules with numbers of micro-batches.
    pipelines: Vec<(PipelineConfig, usize)>,
    /// The highest ZeRO stage that shards anything.
    zero: u8,
}

/// Of more ranks than these only some variants are tried: all pairs of options are there among fewer ranks.
const FEW: usize = 8;

/// Every kind of recomputation; the first ones are those that [`candidates`] take in turn.
fn recomputations() -> [Recompute; 7] {
    let keep = |recompute| Recompute { keep_attention: true, ..recompute };
    [
        Recompute::default(),
        Recompute::selective(&MODULES),
        full(Method::Uniform, 1),
        full(Method::Block, 1),
        full(Method::Uniform, 2),
        keep(full(Method::Uniform, 2)),
        keep(full(Method::Block, 1)),
    ]
}

/// Every combination of tensor, sequence, context, pipeline and data parallelism on up to `ranks` ranks that `allowed`
/// accepts, with every schedule, every ZeRO stage and several numbers of micro-batches per step that divide
/// `global_batch`. Further options take turns: recomputation, how attention is computed over context parallel ranks,
/// the layout of `experts` over the same ranks, and whether their collectives are overlapped. Then follow layouts with
/// the pairs of options that did not meet. `layers` are divided as evenly as possible. The reference, one device and
/// one micro-batch, is not among them.
pub fn candidates(
    ranks: usize,
    global_batch: usize,
    layers: usize,
    experts: bool,
    allowed: impl Fn(&ParallelLayout, &ContextConfig) -> bool,
) -> Vec<Candidate> {
    let shapes = shapes(ranks, global_batch, layers, experts, allowed);
    let mut list: Vec<Candidate> = Vec::new();
    let recomputations = &recomputations()[..6];
    for shape in &shapes {
        let mut layouts = shape.layouts.iter().cycle();
        for (pipeline, accumulation) in &shape.pipelines {
            for zero in 0..=shape.zero {
                let layout = ParallelLayout { zero, ..layouts.next().expect("there is one").clone() };
                let (turn, several) = (list.len(), layout.ep * layout.expert_tp() > 1);
                list.push(Candidate {
                    layout,
                    context: shape.contexts[turn % shape.contexts.len()].clone(),
                    accumulation: *accumulation,
                    pipeline: pipeline.clone(),
                    recompute: recomputations[turn % recomputations.len()].clone(),
                    moe_overlap: several && turn % 2 == 1,
                });
            }
        }
    }
    let covered: Vec<Options> = list.iter().map(options).collect();
    let all = variants(&shapes, |_| true);
    list.extend(covering(all, &covered));
    list
}

/// A short list of the layouts that [`candidates`] choose from and `legal` accepts, in which every two options meet
/// that can.
pub fn pairwise(
    ranks: usize,
    global_batch: usize,
    layers: usize,
    experts: bool,
    allowed: impl Fn(&ParallelLayout, &ContextConfig) -> bool,
    legal: impl Fn(&Candidate) -> bool,
) -> Vec<Candidate> {
    covering(variants(&shapes(ranks, global_batch, layers, experts, allowed), legal), &[])
}

fn covering(mut all: Vec<Candidate>, covered: &[Options]) -> Vec<Candidate> {
    let taken = cover(&all.iter().map(options).collect::<Vec<_>>(), covered);
    taken.into_iter().map(|index| std::mem::take(&mut all[index])).collect()
}

/// All that shapes of few ranks offer and `legal` accepts.
fn variants(shapes: &[Shape], legal: impl Fn(&Candidate) -> bool) -> Vec<Candidate> {
    let mut list = Vec::new();
    for Shape { layouts, contexts, pipelines, zero } in shapes {
        for layout in layouts.iter().filter(|layout| layout.world_size() <= FEW) {
            let overlaps = if layout.ep * layout.expert_tp() > 1 { &[false, true][..] } else { &[false] };
            for (pipeline, accumulation) in pipelines {
                let several = (0..=*zero).flat_map(|zero| contexts.iter().map(move |context| (zero, context)));
                for ((zero, context), recompute) in several.flat_map(|two| recomputations().map(|again| (two, again))) {
                    for moe_overlap in overlaps {
                        list.push(Candidate {
                            layout: ParallelLayout { zero, ..layout.clone() },
                            context: context.clone(),
                            accumulation: *accumulation,
                            pipeline: pipeline.clone(),
                            recompute: recompute.clone(),
                            moe_overlap: *moe_overlap,
                        });
                    }
                }
            }
        }
    }
    list.retain(legal);
    list
}

/// The option of each kind that a layout has.
fn options(candidate: &Candidate) -> Options {
    let Candidate { layout, context, accumulation, pipeline, recompute, moe_overlap } = candidate;
    let word = context.comm_type.first().and_then(|word| CommWord::ALL.iter().position(|other| other == word));
    let schedule = pipeline.schedule.and_then(|kind| ScheduleKind::ALL.iter().position(|other| *other == kind));
    let again = recomputations().iter().position(|other| other == recompute);
    let numbers = [
        layout.tp,
        usize::from(layout.sp),
        layout.cp,
        word.filter(|_| layout.cp > 1).map_or(0, |word| word + 1),
        layout.pp,
        layout.vpp,
        schedule.map_or(0, |schedule| schedule + 1),
        *accumulation,
        layout.dp,
        usize::from(layout.zero),
        again.unwrap_or(usize::MAX),
        layout.ep,
        layout.expert_tp(),
        usize::from(*moe_overlap),
    ];
    numbers.into_iter().map(|number| number as u16).collect()
}

fn shapes(
    ranks: usize,
    global_batch: usize,
    layers: usize,
    experts: bool,
    allowed: impl Fn(&ParallelLayout, &ContextConfig) -> bool,
) -> Vec<Shape> {
    let shape = |layout: ParallelLayout| {
        let mut contexts = contexts(layout.cp);
        contexts.retain(|context| allowed(&layout, context));
        let mut layouts = expert_layouts(&layout, experts);
        layouts.retain(|layout| contexts.iter().any(|context| allowed(layout, context)));
        let legal = |(pipeline, accumulation): &(PipelineConfig, usize)| {
            let reference = layout.world_size() * accumulation == 1;
            global_batch.is_multiple_of(layout.dp * accumulation)
                && pipeline.resolve(&layout, layers, *accumulation).is_ok()
                // A pipeline with fewer micro-batches than stages says little; more of them nothing new.
                && (layout.pp == 1 && *accumulation <= 2 || (layout.pp..=2 * layout.pp).contains(accumulation))
                && !reference
        };
        let pipelines = pipelines(&layout, layers).into_iter();
        let pipelines =
            pipelines.flat_map(|pipeline| [1, 2, 4, 8].map(|accumulation| (pipeline.clone(), accumulation)));
        let several =
            |experts: &ParallelLayout| layout.dp * layout.cp > 1 || experts.ep * experts.expert_tp() < layout.tp;
        let zero = if layouts.iter().any(several) { 3 } else { 0 };
        Shape { pipelines: pipelines.filter(legal).collect(), layouts, contexts, zero }
    };
    let shapes = sizes(ranks).into_iter().map(shape);
    shapes.filter(|shape| !shape.layouts.is_empty() && !shape.contexts.is_empty()).collect()
}

/// Sizes of at most `ranks` ranks together.
fn sizes(ranks: usize) -> Vec<ParallelLayout> {
    let mut list = Vec::new();
    for tp in 1..=ranks {
        for cp in 1..=ranks / tp {
            for pp in 1..=ranks / tp / cp {
                for dp in 1..=ranks / tp / cp / pp {
                    for (sp, vpp) in [(false, 1), (true, 1), (false, 2), (true, 2)] {
                        if (!sp || tp > 1) && (vpp == 1 || pp > 1) {
                            list.push(ParallelLayout { tp, sp, cp, pp, vpp, dp, ..Default::default() });
                        }
                    }
                }
            }
        }
    }
    list
}

/// Every layout of the experts over the ranks of a stage: that of attention, and sizes of their own.
fn expert_layouts(layout: &ParallelLayout, experts: bool) -> Vec<ParallelLayout> {
    let ranks = layout.tp * layout.cp * layout.dp;
    let divisors = |count: usize| (1..=count).filter(move |part| count.is_multiple_of(*part));
    let sizes = divisors(ranks).flat_map(|etp| divisors(ranks / etp).map(move |ep| (etp, ep)));
    let of =
        |(etp, ep): (usize, usize)| ParallelLayout { ep, etp: (etp != layout.tp).then_some(etp), ..layout.clone() };
    sizes.filter(|sizes| experts || *sizes == (layout.tp, 1)).map(of).collect()
}

/// Every algorithm of attention over `cp` ranks, with blocks of two where there are blocks.
fn contexts(cp: usize) -> Vec<ContextConfig> {
    let words = CommWord::ALL.into_iter().filter(|word| match word {
        CommWord::P2p => true,
        CommWord::A2aP2p => cp > 2 && cp.is_multiple_of(2),
        _ => cp > 1,
    });
    words.map(|word| ContextConfig::all(word, 2, cp)).collect()
}

/// Every schedule for the layout, with its stages.
fn pipelines(layout: &ParallelLayout, layers: usize) -> Vec<PipelineConfig> {
    let schedules: &[ScheduleKind] = match (layout.pp, layout.vpp) {
        (1, _) => return vec![PipelineConfig::default()],
        (_, 1) => &[ScheduleKind::GPipe, ScheduleKind::OneFOneB, ScheduleKind::ZbH1],
        _ => &[ScheduleKind::Interleaved, ScheduleKind::ZbV],
    };
    let stages = layout.pp * layout.vpp;
    let text = || StageLayout::balanced(layers, stages).to_string();
    let uneven = !layers.is_multiple_of(stages);
    let with = |schedule: &ScheduleKind| PipelineConfig {
        schedule: Some(*schedule),
        layout: uneven.then(text),
        ..Default::default()
    };
    schedules.iter().map(with).collect()
}

#[cfg(test)]
mod tests;
