//! Experts over the same ranks in layouts of their own: the numbers are those of one device.

use backend_dist::launch::launch;
use backend_dist::mesh::Mesh;
use burn::tensor::{Device, FloatDType};
use burn_megatron::engine::{EngineConfig, RankEngine};
use burn_megatron::verify::Job;
use models::layers::BalanceOver;
use models::{CausalLm, DeepSeekV3, DeepSeekV3Config, Mixtral, MixtralConfig, ModelConfig, ParamBuilder};
use tests::{SETTINGS, equal_one_device, layouts, moe, train_on, weights};

fn mixtral() -> MixtralConfig {
    MixtralConfig { num_experts: 4, router_aux_loss_coef: 0.5, router_z_loss_coef: 0.1, ..moe() }
}

#[test]
fn experts_divided_over_dp_ranks() {
    let layouts = layouts![
        "DP1 x2" "DP2" "DP2 ZeRO3" "DP2 EP2" "DP2 EP2 ZeRO3 x2" "DP4 EP4 ZeRO1" "DP4 EP2" "DP4 EP2 ZeRO1 x2"
        "DP4 EP2 ZeRO2 x2" "DP4 EP2 ZeRO3" "DP2 EP2 selective" "DP2 EP2 x2 uniform1" "DP2 EP1 ETP2 ZeRO2"
        "DP4 EP2 ETP2"
    ];
    equal_one_device::<Mixtral>(&mixtral(), &SETTINGS, &layouts);
}

#[test]
fn experts_sharded_like_attention_or_not() {
    let layouts = layouts![
        "TP2" "TP2 SP" "TP2 ETP1 ZeRO3" "TP2 SP ETP1 EP2" "TP2 ETP1 EP2 x2" "TP2 SP DP2 EP2 ZeRO1"
        "TP2 DP2 EP2 ZeRO3 x2" "TP2 SP DP2 EP4 ETP1" "TP2 DP2 EP2 ETP1 ZeRO2" "TP2 SP DP2 EP2 ETP1 ZeRO3 uniform2"
        "TP2 SP DP2 EP1 ETP4"
    ];
    equal_one_device::<Mixtral>(&mixtral(), &SETTINGS, &layouts);
}

#[test]
fn experts_in_pipelines_and_over_parts_of_sequences() {
    let layouts = layouts![
        "PP2 x2" "PP2 DP2 EP2 x2 1f1b" "PP2 DP2 EP2 ZeRO2 x2 zb-h1" "PP2 VPP2 DP2 EP2 ZeRO1 x2 interleaved"
        "TP2 SP PP2 EP2 ETP1 x2 zb-h1" "CP2" "CP2 EP2" "CP2 DP2 EP4 ZeRO1" "TP2 SP CP2 EP2 ETP1 ZeRO3"
        "DP2 dynamic:64" "DP2 EP2 dynamic:8" "PP2 DP2 EP2 x2 dynamic:64"
    ];
    equal_one_device::<Mixtral>(&mixtral(), &SETTINGS, &layouts);
}

/// Two chunks of every rank's experts, or one where a rank has one expert.
#[test]
fn collectives_overlapped_with_experts() {
    let layouts = layouts![
        "DP2 EP2 moe-overlap" "DP4 EP4 ZeRO1 moe-overlap" "DP4 EP2 ETP2 x2 moe-overlap"
        "DP4 EP2 ZeRO3 moe-overlap selective" "TP2 SP DP2 EP2 ETP1 ZeRO2 x2 moe-overlap uniform1"
        "PP2 DP2 EP2 ZeRO2 x2 zb-h1 moe-overlap" "CP2 EP2 moe-overlap" "DP2 EP2 dynamic:8 moe-overlap"
    ];
    equal_one_device::<Mixtral>(&mixtral(), &SETTINGS, &layouts);
}

/// Sigmoid scores, groups of experts, a shared expert, and a bias that moves far enough in three steps to send tokens
/// elsewhere. The bias is compared like a weight.
#[test]
fn biases_that_balance_experts() {
    let config = DeepSeekV3Config { vocab_size: 101, moe_router_bias_update_rate: 0.05, ..DeepSeekV3Config::tiny() };
    let layouts = layouts![
        "DP1 x2" "DP2 EP2" "DP4 EP4 ZeRO3" "TP2 SP EP2 ETP1 x2" "TP2 SP DP2 EP2 ETP1 ZeRO1"
        "PP2 DP2 EP2 x2 1f1b Ett|tL" "DP2 EP2 uniform1"
    ];
    equal_one_device::<DeepSeekV3>(&config, &SETTINGS, &layouts);
}

/// With a loss that balances the tokens of a whole step, of which recomputed passes must have the same shares, a bias
/// that moves with the tokens, and modules of multi-token prediction that a recomputed head computes for the first time.
#[test]
fn statistics_of_routers_do_not_change_training() {
    let config = models::sized! { DeepSeekV3Config::tiny();
        vocab_size: 101, moe_router_bias_update_rate: 0.05, router_aux_loss_coef: 0.5,
        router_balance: BalanceOver::Global
    };
    let job = |router_statistics: bool| {
        let job = SETTINGS.job(config.vocab_size);
        Job { engine: EngineConfig { router_statistics, ..job.engine }, ..job }
    };
    for layout in ["x2", "x2 uniform1", "x2 selective", "DP2 EP2 x2 uniform2", "PP2 x2 uniform1 Ett|tL"] {
        let [with, without] = [true, false].map(|statistics| train_on::<DeepSeekV3>(&config, layout, &job(statistics)));
        assert_eq!(with[0].losses, without[0].losses, "{layout}: losses");
        let [with, without] = [with, without].map(|ranks| weights(layout, &ranks));
        assert!(with == without, "{layout}: weights");
        let biases = with.iter().filter(|(name, _)| name.ends_with(".expert_bias"));
        assert!(biases.flat_map(|(_, bias)| &bias.data).any(|value| *value != 0.0), "{layout}: no bias moved");
    }
    let mesh = Mesh::new("TP1".parse().unwrap()).unwrap();
    for (statistics, layers) in [(true, true), (false, false)] {
        let Job { engine, batches, .. } = job(statistics);
        let counted = launch(&mesh, &[Device::flex()], |rank| {
            let params = |part| ParamBuilder::new(&rank, FloatDType::F64, SETTINGS.seed).with_part(part);
            let build = |part| Ok(DeepSeekV3::build(&config, params(part))?);
            let mut engine = RankEngine::new(&rank, &config.dims(), build, engine.clone())?;
            let report = engine.train_step(&batches[0])?;
            Ok((!engine.expert_loads().is_empty(), report.experts.is_some()))
        });
        assert_eq!(counted.unwrap(), [(layers, layers)]);
    }
}
