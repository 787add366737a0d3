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

/// Options that take turns may never meet without the layouts that follow, such as ZeRO 3 and saved attention.
#[test]
fn every_two_options_meet() {
    for experts in [false, true] {
        let allowed = |layout: &ParallelLayout, _: &ContextConfig| layout.expert_tp() < 4 && layout.tp != 3;
        let list = candidates(4, 8, 2, experts, allowed);
        let both = |c: &&Candidate| c.layout.zero == 3 && c.recompute.keep_attention;
        assert!(list.iter().filter(both).count() > 1, "{experts}");
        let short = pairwise(4, 8, 2, experts, allowed, |_| true);
        let all: Vec<Options> = variants(&shapes(4, 8, 2, experts, allowed), |_| true).iter().map(options).collect();
        for some in [&list, &short] {
            let covered: Vec<Options> = some.iter().map(options).collect();
            assert_eq!(cover(&all, &covered), Vec::<usize>::new(), "{experts}");
        }
        assert!(short.len() < 120 && short.len() * 2 < list.len(), "{} {}", short.len(), list.len());
        let mut words: Vec<String> = list.iter().map(ToString::to_string).collect();
        let count = words.len();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), count, "no layout is there twice");
    }
    let none = pairwise(4, 8, 2, false, |_, _| true, |candidate| candidate.layout.zero == 0);
    assert!(!none.is_empty() && none.iter().all(|candidate| candidate.layout.zero == 0));
}
