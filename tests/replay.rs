//! Recorded Megatron-Core runs are repeated, step by step, in every layout that runs.

use burn::tensor::{Device, FloatDType};
use burn_megatron::replay::{Oracle, layouts, replay};
use std::path::Path;
use tests::layouts;

const LAYOUTS: [&str; 14] = layouts![
    "TP1" "TP2" "TP4" "TP2 SP" "TP4 SP" "DP2" "TP2 DP2" "TP2 SP DP2" "PP2" "PP2 VPP2" "TP2 PP2 DP2 ZeRO1"
    "TP2 SP PP2 VPP2" "PP2 DP2 ZeRO2" "DP4 ZeRO3"
];

fn load(name: &str) -> Oracle {
    Oracle::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/megatron").join(name)).unwrap()
}

fn repeats_in_every_layout(name: &str, steps: usize) {
    let oracle = load(name);
    assert_eq!(oracle.steps.len(), steps);
    for layout in LAYOUTS {
        let replay = replay(&oracle, &layout.parse().unwrap(), FloatDType::F64, &[Device::flex()].into()).unwrap();
        assert_eq!(replay.steps.len(), steps);
        assert!(replay.passes(), "{name} in {layout}:\n{replay}");
    }
}

#[test]
fn dense() {
    repeats_in_every_layout("dense", 20);
}

#[test]
fn tied() {
    repeats_in_every_layout("tied", 10);
}

/// Four experts, of which a token uses two, with an auxiliary loss: divided over ranks with and without the other kinds
/// of parallelism, and sharded like attention or less than it.
#[test]
fn experts() {
    let oracle = load("moe");
    for layout in layouts![
        "DP1" "DP2 EP2" "DP4 EP4" "DP4 EP2 ZeRO3" "PP2 DP2 EP2" "TP2" "TP2 SP" "TP2 SP DP2 EP2 ZeRO1" "TP2 EP2 ETP1"
        "TP2 SP DP2 EP4 ETP1 ZeRO2" "TP2 SP PP2 VPP2 EP2 ETP1"
    ] {
        let replay = replay(&oracle, &layout.parse().unwrap(), FloatDType::F64, &[Device::flex()].into()).unwrap();
        assert_eq!(replay.steps.len(), 10);
        assert!(replay.passes(), "{layout}:\n{replay}");
    }
    let list: Vec<String> = layouts(&oracle, 2).unwrap().iter().map(ToString::to_string).collect();
    assert!(list.contains(&"EP2 DP2 ZeRO3".into()) && list.contains(&"TP2 SP".into()), "{list:?}");
}

#[test]
fn single_precision_stays_near() {
    for (name, layout) in [("dense", "TP1"), ("dense", "TP2 SP"), ("tied", "TP2 SP DP2"), ("tied", "TP4")] {
        let replay = replay(&load(name), &layout.parse().unwrap(), FloatDType::F32, &[Device::flex()].into()).unwrap();
        assert!(replay.passes(), "{name} in {layout}:\n{replay}");
    }
}

/// Every mix of two ranks that fits, which is every mix there is: the recorded model has sizes that two divide.
#[test]
fn the_layouts_of_two_ranks_are_all_of_them() {
    let oracle = load("dense");
    let list: Vec<String> = layouts(&oracle, 2).unwrap().iter().map(ToString::to_string).collect();
    assert_eq!(list, ["DP2", "DP2 ZeRO1", "DP2 ZeRO2", "DP2 ZeRO3", "PP2", "PP2 VPP2", "TP2", "TP2 SP"]);
    assert!(layouts(&oracle, 4).unwrap().iter().all(|layout| layout.world_size() == 4));
}

#[test]
fn other_tokens_are_noticed() {
    let mut oracle = load("tied");
    oracle.batches[3].labels[5] = (oracle.batches[3].labels[5] + 1) % 128;
    let replay = replay(&oracle, &"TP2 SP".parse().unwrap(), FloatDType::F64, &[Device::flex()].into()).unwrap();
    assert!(!replay.passes());
    let text = replay.to_string();
    let outside: Vec<_> = text.lines().filter(|line| line.ends_with("OUTSIDE")).collect();
    assert!(outside[0].trim_start().starts_with('3') && text.ends_with("DIFFERENT"), "{text}");
}

#[test]
fn what_does_not_run_is_refused() {
    let mut oracle = load("tied");
    let refuse = |oracle: &Oracle, layout: &str| {
        replay(oracle, &layout.parse().unwrap(), FloatDType::F64, &[Device::flex()].into()).unwrap_err().to_string()
    };
    assert!(refuse(&oracle, "DP3").contains("global-batch 8"), "{}", refuse(&oracle, "DP3"));
    assert!(refuse(&oracle, "TP3").contains("nearest legal"), "{}", refuse(&oracle, "TP3"));
    assert!(refuse(&oracle, "PP3").contains("nearest legal"), "{}", refuse(&oracle, "PP3"));
    assert!(refuse(&oracle, "CP3").contains("context-parallel"), "{}", refuse(&oracle, "CP3"));
    oracle.model.bias = true;
    assert!(refuse(&oracle, "TP1").contains("biases"));
    let moe = load("moe");
    assert!(refuse(&moe, "DP8 EP8").contains("expert-parallel 8"), "{}", refuse(&moe, "DP8 EP8"));
}
