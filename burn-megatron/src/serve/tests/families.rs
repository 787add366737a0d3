//! Families that keep something else of a sequence than keys and values: recurrent states, latents.

use models::{DeepSeekV3, DeepSeekV3Config, Mamba2, Mamba2Config, Mixtral, MixtralConfig, NemotronH, NemotronHConfig};

use super::*;

/// More requests than places, prompts longer than a step, and sequences that gave their blocks and states up.
fn assert_serves_what_generate_says<M: CausalLm>(config: &M::Config) {
    let build = |rank: &Rank| {
        M::build(config, ParamBuilder::new(rank, FloatDType::F64, 11).without_autodiff()).expect("a legal model")
    };
    let asked = requests();
    let expected: Vec<Vec<i64>> = asked.iter().map(|request| alone_by(build, request)).collect();
    for (layout, num_blocks) in [("TP1", 40), ("TP2", 40), ("TP2 SP", 40), ("TP1", 12), ("TP2", 12)] {
        let (events, statistics) = served_by(build, layout, SchedulerConfig { num_blocks, ..sizes() }, &asked);
        assert_eq!(statistics.preemptions > 0, num_blocks == 12, "{layout}: {statistics:?}");
        for (request, (events, expected)) in asked.iter().zip(events.iter().zip(&expected)) {
            assert_eq!(&tokens(events), expected, "{layout}, {num_blocks} blocks: {request:?}");
        }
    }
}

#[test]
fn qwen3_next() {
    let config = MixtralConfig { vocab_size: 61, initializer_range: 0.4, ..MixtralConfig::qwen3_next_tiny() };
    assert_serves_what_generate_says::<Mixtral>(&config);
}

#[test]
fn mamba2() {
    let config = Mamba2Config { vocab_size: 61, initializer_range: 0.4, ..Mamba2Config::tiny() };
    assert_serves_what_generate_says::<Mamba2>(&config);
}

#[test]
fn nemotron_h() {
    let config = NemotronHConfig { vocab_size: 61, initializer_range: 0.4, ..NemotronHConfig::tiny() };
    assert_serves_what_generate_says::<NemotronH>(&config);
}

#[test]
fn nemotron_3() {
    let config = NemotronHConfig { vocab_size: 61, initializer_range: 0.4, ..NemotronHConfig::nemotron_3_tiny() };
    assert_serves_what_generate_says::<NemotronH>(&config);
}

/// A sequence that gave its blocks up is read again as one chunk, by heads and not by latents.
#[test]
fn deepseek_v3() {
    let config = DeepSeekV3Config { vocab_size: 61, initializer_range: 0.4, ..DeepSeekV3Config::tiny() };
    assert_serves_what_generate_says::<DeepSeekV3>(&config);
}
