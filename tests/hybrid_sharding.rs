//! ZeRO inside groups of data-parallel ranks, which all hold the same (PyTorch's HSDP, Megatron-LM's
//! `--num-distributed-optimizer-instances`).

use backend_dist::launch::launch;
use backend_dist::mesh::{Axis, Mesh};
use burn::tensor::{Device, FloatDType};
use burn_megatron::engine::{EngineConfig, RankEngine};
use burn_megatron::optim::{MuonConfig, OptimizerConfig};
use burn_megatron::verify::{Candidate, Settings};
use models::{CausalLm, Gpt, Llama, Mixtral, MixtralConfig, ModelConfig, ParamBuilder};
use tests::{SETTINGS, equal_one_device, gpt, layouts, llama, moe, train, weights};

#[test]
fn groups_equal_one_device() {
    let layouts = layouts![
        "DP4 ZeRO1 Group2" "DP4 ZeRO2 Group2" "DP4 ZeRO3 Group2" "DP4 ZeRO1 Group2 x2" "DP4 ZeRO2 Group2 x2"
        "DP4 ZeRO3 Group2 x2" "DP4 ZeRO3 Group1" "DP8 ZeRO2 Group4" "CP2 DP2 ZeRO3 Group2"
        "CP2 DP2 ZeRO1 Group2 x2 uniform1" "TP2 SP DP4 ZeRO1 Group2" "TP2 SP DP4 ZeRO3 Group2 x2"
        "PP2 DP4 ZeRO2 Group2 x2 zb-h1" "PP2 VPP2 DP4 ZeRO3 Group2 x2" "TP2 DP4 ZeRO3 Group2 x2 selective"
    ];
    equal_one_device::<Llama>(&llama(), &SETTINGS, &layouts);
    // Tied embeddings, whose two copies are summed over the first and the last stage.
    equal_one_device::<Gpt>(&gpt(), &SETTINGS, &["DP4 ZeRO3 Group2 x2", "PP2 DP4 ZeRO1 Group2 x2 Ett|tL"]);
}

#[test]
fn groups_in_bf16_with_master_weights_are_within_megatrons_bound() {
    let settings = Settings { dtype: FloatDType::BF16, steps: 1, ..SETTINGS };
    equal_one_device::<Llama>(
        &llama(),
        &settings,
        &["DP4 ZeRO1 Group2", "DP4 ZeRO3 Group2 x2", "TP2 DP4 ZeRO2 Group2"],
    );
}

/// As many groups of the ranks that hold the same experts: of one rank, of several, and of all.
#[test]
fn groups_with_experts_equal_one_device() {
    let config = MixtralConfig { num_experts: 4, router_aux_loss_coef: 0.5, router_z_loss_coef: 0.1, ..moe() };
    let layouts = layouts![
        "DP4 EP2 ZeRO1 Group2" "DP4 EP2 ZeRO3 Group2 x2" "DP8 EP2 ZeRO2 Group4" "TP2 SP DP4 EP2 ETP1 ZeRO3 Group2"
        "DP4 ZeRO3 Group2"
    ];
    equal_one_device::<Mixtral>(&config, &SETTINGS, &layouts);
}

/// The ranks of a group add first, so the bits of plain ZeRO are those of one group of all ranks. All stages of one grouping
/// agree, pipelines and recomputation change nothing.
#[test]
fn all_stages_of_a_grouping_have_the_same_bits() {
    for (first, others) in [
        ("DP4 ZeRO1", &["DP4 ZeRO1 Group4", "DP4 ZeRO2 Group4", "DP4 ZeRO3 Group1"][..]),
        ("DP4 ZeRO1 Group2", &["DP4 ZeRO2 Group2", "DP4 ZeRO3 Group2", "DP4 ZeRO3 Group2 uniform1"]),
        ("DP4 ZeRO2 Group2 x2", &["DP4 ZeRO3 Group2 x2", "PP2 DP4 ZeRO2 Group2 x2 zb-h1"]),
    ] {
        let reference = train::<Llama>(&llama(), first, None);
        for layout in others {
            let ranks = train::<Llama>(&llama(), layout, None);
            assert_eq!(ranks[0].losses, reference[0].losses, "{layout}: losses");
            assert_eq!(ranks[0].grad_norms, reference[0].grad_norms, "{layout}: gradient norms");
            assert!(weights(layout, &ranks) == weights(first, &reference), "{layout}: weights");
        }
    }
}

/// Muon gathers the momentum of a matrix inside the group that shards it.
#[test]
fn muon_steps_alike_in_every_group() {
    let muon = OptimizerConfig::Muon(MuonConfig::default());
    let [plain, grouped] = ["DP4", "DP4 ZeRO3 Group2"].map(|layout| train::<Llama>(&llama(), layout, Some(&muon)));
    for (a, b) in plain[0].losses.iter().zip(&grouped[0].losses) {
        assert!((a - b).abs() <= 1e-10 * a, "{a} {b}");
    }
}

/// Bytes that a rank gives to the collectives inside its group, across the groups, and of all data-parallel ranks.
fn given_bytes(layout: &str) -> [u64; 3] {
    let (config, candidate): (_, Candidate) = (llama(), layout.parse().unwrap());
    let job = SETTINGS.job(config.vocab_size());
    let sizes = &candidate.layout;
    let micro_batch = SETTINGS.global_batch / sizes.dp / candidate.accumulation;
    let engine = EngineConfig { micro_batch, pipeline: candidate.pipeline.clone(), ..job.engine.clone() };
    let group = sizes.zero_group.unwrap_or(sizes.dp);
    let ranks = launch(&Mesh::new(sizes.clone()).unwrap(), &[Device::flex()], |rank| {
        let params = |part| ParamBuilder::new(&rank, FloatDType::F64, SETTINGS.seed).with_part(part);
        let build = |part| Ok(Llama::build(&config, params(part))?);
        let mut engine = RankEngine::new(&rank, &config.dims(), build, engine.clone())?;
        engine.train_step(&job.batches[0])?;
        let groups =
            [rank.subgroup(Axis::DpCp, group), rank.across_subgroups(Axis::DpCp, group), rank.group(Axis::DpCp)];
        Ok(groups.map(|group| group.given_bytes()))
    })
    .unwrap();
    assert!(ranks.iter().all(|rank| *rank == ranks[0]), "{layout}: {ranks:?}");
    ranks[0]
}

/// Between groups, whose ranks may be on other hosts, only the gradients of a shard are sent, once per step. Without
/// groups all of the gradients are, and the weights, as often as they are used.
#[test]
fn only_shards_of_gradients_are_sent_between_groups() {
    let [.., whole] = given_bytes("DP4");
    assert_eq!(given_bytes("DP4 ZeRO1")[2], whole + whole / 4, "gradients, and a shard of the weights");
    // In f64 weights are as large as gradients. CPU ranks gather them for each pass, and again for the backward pass.
    for (layout, inside) in [
        ("DP4 ZeRO1 Group2", whole + whole / 2),
        ("DP4 ZeRO2 Group2 x2", 2 * whole + whole / 2),
        ("DP4 ZeRO3 Group2 x2", 2 * whole + 4 * whole / 2),
    ] {
        assert_eq!(given_bytes(layout), [inside, whole / 2, 0], "{layout}");
    }
}

#[test]
fn groups_that_do_not_divide_the_ranks_are_refused() {
    let refusal = |text: &str| text.parse::<Candidate>().unwrap_err().to_string();
    assert_eq!(refusal("DP4 ZeRO3 Group3"), "zero-group 3 does not divide data-parallel 4; nearest legal: 2, 4");
    assert!(refusal("DP4 Group2").starts_with("zero-group 2 needs zero 1, 2 or 3"));
}
