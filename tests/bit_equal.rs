//! Where a layout adds the same numbers in the same order as another one, it must give the same bits: pipelines as no
//! pipeline, ZeRO as plain data parallelism, recomputation as none.

use burn_megatron::optim::{AdamWConfig, OptimizerConfig};
use models::{CausalLm, Gpt, Llama, Mixtral};
use tests::{gpt, llama, moe, train, weights};

fn same_bits<M: CausalLm>(config: &M::Config, plain: &str, others: &[&str]) {
    let reference = train::<M>(config, plain, None);
    for layout in others {
        let ranks = train::<M>(config, layout, None);
        assert_eq!(ranks[0].losses, reference[0].losses, "{layout}: losses");
        assert_eq!(ranks[0].grad_norms, reference[0].grad_norms, "{layout}: gradient norms");
        assert!(weights(layout, &ranks) == weights(plain, &reference), "{layout}: weights");
    }
}

#[test]
fn pipelines() {
    let every = ["PP2 x4", "PP4 x4 gpipe", "PP2 VPP2 x4", "PP4 x4 zb-h1", "PP2 VPP2 x4 zb-v", "PP2 x4 Et|tttL"];
    same_bits::<Llama>(&llama(), "x4", &every);
    let own = [
        "PP2 x4 passes:0F0,0F1,0F2,0I0,0F3,0I1,0W0,0I2,0W1,0W2,0B3/1F0,1I0,1F1,1W0,1B1,1F2,1I2,1F3,1I3,1W2,1W3",
        "PP2 DP2 x2 ZeRO1 passes:0F0,3F0,0F1,3I0,3F1,3I1,0B0,3W0,3W1,0B1/1F0,2F0,1F1,2F1,2I0,1I0,2B1,2W0,1B1,1W0",
    ];
    same_bits::<Llama>(&llama(), "x4", &own[..1]);
    same_bits::<Llama>(&llama(), "DP2 x2", &own[1..]);
    same_bits::<Llama>(&llama(), "TP2 SP DP2 x2", &["TP2 SP PP2 DP2 x2", "TP2 SP PP2 DP2 ZeRO1 x2 zb-h1"]);
}

#[test]
fn zero() {
    // With several micro-batches ZeRO 2 and 3 sum over the data-parallel ranks first, then over the micro-batches.
    same_bits::<Llama>(&llama(), "DP4", &["DP4 ZeRO1", "DP4 ZeRO2", "DP4 ZeRO3"]);
    same_bits::<Llama>(&llama(), "DP2 x4", &["DP2 ZeRO1 x4"]);
    same_bits::<Llama>(&llama(), "DP2 ZeRO2 x4", &["DP2 ZeRO3 x4", "PP2 DP2 ZeRO3 x4 zb-h1", "PP2 VPP2 DP2 ZeRO3 x4"]);
    same_bits::<Gpt>(&gpt(), "TP2 SP DP2", &["TP2 SP DP2 ZeRO1", "TP2 SP DP2 ZeRO2", "TP2 SP DP2 ZeRO3"]);
}

/// With the states of all or of some layers in host memory.
fn same_bits_on_the_host<M: CausalLm>(config: &M::Config, layouts: &[&str]) {
    let adamw = AdamWConfig { weight_decay: 0.1, ..AdamWConfig::default() };
    for layout in layouts {
        let run = |adamw: AdamWConfig| train::<M>(config, layout, Some(&OptimizerConfig::from(adamw)));
        let device = run(adamw);
        for offload_fraction in [1.0, 0.4] {
            let host = run(AdamWConfig { cpu_offload: true, offload_fraction, ..adamw });
            assert_eq!(host[0].losses, device[0].losses, "{layout}: losses");
            assert_eq!(host[0].grad_norms, device[0].grad_norms, "{layout}: gradient norms");
            assert!(weights(layout, &host) == weights(layout, &device), "{layout}: weights");
        }
    }
}

#[test]
fn optimizer_states_in_host_memory() {
    let dense = ["x2", "TP2 SP DP2 ZeRO1 x2", "PP2 DP2 ZeRO2 x4 zb-h1", "CP2 DP2 ZeRO3", "DP4 ZeRO3 Group2"];
    same_bits_on_the_host::<Llama>(&llama(), &dense);
    same_bits_on_the_host::<Gpt>(&gpt(), &["PP2 DP2 ZeRO1 x2 Ett|tL", "TP2 SP DP2 ZeRO3"]);
    same_bits_on_the_host::<Mixtral>(&moe(), &["DP4 EP2 ZeRO1 x2", "TP2 SP DP2 EP2 ETP1 ZeRO3"]);
}

#[test]
fn recomputation_with_dropout() {
    let kinds = [
        "x2 selective",
        "x2 uniform1",
        "x2 uniform2",
        "x2 block1",
        "x2 uniform2 keep-attention",
        "x2 uniform1 cpu-offload",
    ];
    same_bits::<Gpt>(&gpt(), "x2", &kinds);
    let stages =
        ["TP2 SP PP2 x4 selective", "TP2 SP PP2 x4 block1", "TP2 SP PP2 x4 uniform1 keep-attention cpu-offload"];
    same_bits::<Llama>(&llama(), "TP2 SP PP2 x4", &stages);
    for comm in ["p2p", "all_gather", "a2a", "a2a+p2p:2"] {
        let layout = format!("CP4 {comm} x2");
        let again =
            ["uniform1", "block1 keep-attention", "uniform2 keep-attention"].map(|how| format!("{layout} {how}"));
        same_bits::<Llama>(&llama(), &layout, &again.each_ref().map(String::as_str));
    }
}
