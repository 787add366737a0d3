//! Which layouts to try. Pure.

use super::Candidate;
use super::candidate::{MODULES, full};
use crate::engine::{CommWord, ContextConfig};
use crate::schedule::stages::StageLayout;
use crate::schedule::{PipelineConfig, ScheduleKind};
use backend_dist::mesh::ParallelLayout;
use models::recompute::{Method, Recompute};

/// Every combination of tensor, sequence, context, pipeline and data parallelism on up to `ranks` ranks that `allowed`
/// accepts, with every schedule, every ZeRO stage and several numbers of micro-batches per step that divide
/// `global_batch`. The ways to recompute take turns, and so do the ways across context parallel ranks that `allowed`
/// accepts, so that each meets everything else somewhere. So do exchanges beside experts and others, and, where there
/// are `experts`, all their layouts over the same ranks. `layers` are divided as evenly as possible. The reference, one
/// device and one micro-batch, is not among them.
pub fn candidates(
    ranks: usize,
    global_batch: usize,
    layers: usize,
    experts: bool,
    allowed: impl Fn(&ParallelLayout, &ContextConfig) -> bool,
) -> Vec<Candidate> {
    let recompute = [
        Recompute::default(),
        Recompute::selective(&MODULES),
        full(Method::Uniform, 1),
        full(Method::Block, 1),
        full(Method::Uniform, 2),
        Recompute { keep_attention: true, ..full(Method::Uniform, 2) },
    ];
    let mut list = Vec::new();
    for layout in sizes(ranks) {
        let mut ways = contexts(layout.cp);
        ways.retain(|context| allowed(&layout, context));
        let mut folds = folds(&layout, experts);
        folds.retain(|layout| ways.iter().any(|context| allowed(layout, context)));
        if ways.is_empty() || folds.is_empty() {
            continue;
        }
        let mut fold = folds.iter().cycle();
        for pipeline in pipelines(&layout, layers) {
            for accumulation in [1, 2, 4, 8] {
                let reference = layout.world_size() * accumulation == 1;
                let fits = global_batch.is_multiple_of(layout.dp * accumulation)
                    && pipeline.resolve(&layout, layers, accumulation).is_ok()
                    // A pipeline with fewer micro-batches than stages says little; more of them nothing new.
                    && (layout.pp == 1 && accumulation <= 2 || (layout.pp..=2 * layout.pp).contains(&accumulation));
                if !fits || reference {
                    continue;
                }
                let copies =
                    folds.iter().any(|fold| layout.dp * layout.cp > 1 || fold.ep * fold.expert_tp() < layout.tp);
                for zero in if copies { 0..=3 } else { 0..=0 } {
                    let layout = ParallelLayout { zero, ..fold.next().expect("there is one").clone() };
                    let recompute = recompute[list.len() % recompute.len()].clone();
                    let context = ways[list.len() % ways.len()].clone();
                    let moe_overlap = layout.ep * layout.expert_tp() > 1 && list.len() % 2 == 1;
                    let pipeline = pipeline.clone();
                    list.push(Candidate { layout, context, accumulation, pipeline, recompute, moe_overlap });
                }
            }
        }
    }
    list
}

/// Sizes whose product is at most `ranks`.
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

/// Every way to lay experts over the ranks of a stage: as attention is, and with sizes of their own.
fn folds(layout: &ParallelLayout, experts: bool) -> Vec<ParallelLayout> {
    let ranks = layout.tp * layout.cp * layout.dp;
    let divisors = |count: usize| (1..=count).filter(move |part| count.is_multiple_of(*part));
    let sizes = divisors(ranks).flat_map(|etp| divisors(ranks / etp).map(move |ep| (etp, ep)));
    let fold =
        |(etp, ep): (usize, usize)| ParallelLayout { ep, etp: (etp != layout.tp).then_some(etp), ..layout.clone() };
    sizes.filter(|sizes| experts || *sizes == (layout.tp, 1)).map(fold).collect()
}

/// Every way to compute attention over `cp` ranks, with blocks of two where there are blocks.
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
mod tests {
    use super::*;

    #[test]
    fn every_combination_that_fits() {
        let names = |ranks, layers| -> Vec<String> {
            candidates(ranks, 8, layers, false, |layout, _| layout.tp != 3).iter().map(ToString::to_string).collect()
        };
        let two = names(2, 3);
        for name in ["TP1 x2", "DP2 selective", "TP2 SP x2", "DP2 ZeRO3 x2", "CP2 ZeRO2"] {
            assert!(two.iter().any(|two| two.starts_with(name)), "{name} is not in {two:?}");
        }
        for words in ["PP2 x2 gpipe Ett|tL", "PP2 VPP2 x4 interleaved Et|(t|)*2L", "PP2 VPP2 x2 zb-v Et|(t|)*2L"] {
            assert!(two.iter().any(|two| two.starts_with(words)), "{words} is not in {two:?}");
        }
        let four = names(4, 4);
        let has = |words: &[&str]| four.iter().any(|name| words.iter().all(|word| name.contains(word)));
        assert!(has(&["TP2 SP PP2", "zb-h1"]) && has(&["PP2", "DP2 ZeRO3", "1f1b"]) && has(&["PP4", "uniform2"]));
        assert!(has(&["ZeRO3", "zb-"]) && !has(&["TP3"]));
        let ways = |word: &str| four.iter().filter(|name| name.contains("CP") && name.contains(word)).count();
        assert!(ways(" all_gather") > 20 && ways(" a2a ") > 10 && ways("a2a+p2p:2") > 1, "{four:?}");
        assert!(has(&["TP2 SP CP2"]) && has(&["CP2 PP2", "zb-h1"]) && has(&["CP2 DP2 ZeRO3"]));
        assert!(!four.contains(&"TP1".to_string()));
        assert!(!four.iter().any(|name| name.contains("EP") || name.contains("ETP")));
    }

    #[test]
    fn experts_have_every_layout_of_their_own() {
        let list = candidates(4, 8, 4, true, |layout, _| layout.expert_tp() < 4);
        for layout in
            ["DP2 EP2", "TP2 EP2 ETP1", "TP2 ETP1", "DP4 EP4", "DP4 EP2 ETP2", "TP2 DP2 EP2", "TP2 SP DP2 EP4 ETP1"]
        {
            let layout: ParallelLayout = layout.parse().unwrap();
            let same = |c: &&Candidate| ParallelLayout { zero: 0, ..c.layout.clone() } == layout;
            assert!(list.iter().filter(same).count() > 0, "{layout}");
        }
        let stages = list.iter().filter(|c| c.layout.ep == 2 && c.layout.dp == 2 && c.layout.pp == 2);
        let mut stages: Vec<u8> = stages.map(|candidate| candidate.layout.zero).collect();
        stages.sort_unstable();
        stages.dedup();
        assert!(stages.len() > 2, "{stages:?}");
        assert!(list.iter().any(|c| c.layout.dp == 1 && c.layout.expert_tp() == 1 && c.layout.zero == 3));
    }
}
