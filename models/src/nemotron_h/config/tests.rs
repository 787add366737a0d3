use super::*;

#[test]
fn contradictory_sizes_are_refused() {
    let refuse = |config: NemotronHConfig| config.check().unwrap_err().to_string();
    let tiny = NemotronHConfig::tiny;
    let pattern = |pattern: &str| NemotronHConfig { hybrid_override_pattern: pattern.into(), ..tiny() };
    assert!(refuse(pattern("")).contains("hybrid_override_pattern = 0 is not positive"));
    assert!(refuse(pattern("M é")).contains("layer 1 is ` `; legal: M (Mamba-2), * (attention), - (MLP), E (experts)"));
    assert!(refuse(pattern(&"M".repeat(5000))).contains("nearest legal: 4096"));
    assert_eq!(
        refuse(NemotronHConfig { n_groups: 3, ..tiny() }),
        "n_groups = 3 does not divide mamba_num_heads = 8; nearest legal: 2, 4"
    );
    assert_eq!(
        refuse(NemotronHConfig { num_key_value_heads: 3, ..tiny() }),
        "num_key_value_heads = 3 does not divide num_attention_heads = 8; nearest legal: 2, 4"
    );
    assert!(refuse(NemotronHConfig { ssm_state_size: 0, ..tiny() }).contains("nearest legal: 1"));
    let experts = |change: fn(&mut NemotronHConfig)| {
        let mut config = NemotronHConfig::nemotron_3_tiny();
        change(&mut config);
        refuse(config)
    };
    assert_eq!(experts(|of| of.n_group = 3), "n_group = 3 does not divide n_routed_experts = 8; nearest legal: 2, 4");
    assert_eq!(experts(|of| of.topk_group = 5), "topk_group = 5 is not at most n_group; nearest legal: 4");
    assert_eq!(
        experts(|of| of.num_experts_per_tok = 9),
        "num_experts_per_tok = 9 is not at most n_routed_experts; nearest legal: 8"
    );
    assert_eq!(
        experts(|of| of.num_experts_per_tok = 5),
        "num_experts_per_tok = 5 is not at most the experts of topk_group groups; nearest legal: 4"
    );
    let wide = experts(|of| of.moe_shared_expert_intermediate_size = 0);
    assert_eq!(wide, "moe_shared_expert_intermediate_size = 0 is not positive; nearest legal: 1");
    assert_eq!(
        experts(|of| of.mlp_bias = true),
        "mlp_bias = 1 is not 0 next to experts, which have no biases; nearest legal: 0"
    );
    // Without experts their sizes mean nothing.
    assert_eq!(NemotronHConfig { n_group: 3, ..tiny() }.check(), Ok(()));
    for (_, config) in NemotronHConfig::presets() {
        assert_eq!(config.check(), Ok(()));
    }
}

#[test]
fn sizes_of_kinds_that_the_pattern_lacks_divide_nothing() {
    let of = |pattern: &str| NemotronHConfig { hybrid_override_pattern: pattern.into(), ..NemotronHConfig::tiny() };
    let dims = of("M*").dims();
    assert_eq!((dims.layers, dims.intermediate, dims.states.is_some()), (2, 0, true));
    assert!(dims.experts.is_none());
    let experts = of("ME").dims();
    assert_eq!((experts.intermediate, experts.experts.map(|of| of.count)), (96, Some(8)));
    assert_eq!(of("-E").dims().intermediate, 32, "128 and 96");
    // Attention alone has no states, so any number of ranks may share sequences.
    assert!(of("M*").dims().check_cp(1, 3).is_err());
    assert_eq!(of("*-*-").dims().check_cp(1, 3), Ok(()));
    // Without attention four ranks need not divide its three heads.
    let tp4 = |pattern| {
        let heads = NemotronHConfig { num_attention_heads: 3, num_key_value_heads: 3, ..of(pattern) };
        heads.dims().check_tp(4).is_ok()
    };
    assert_eq!(["M*", "M-", "-E", "-"].map(tp4), [false, true, true, true]);
}

/// Without Mamba-2 layers they shared them although experts drop tokens.
#[test]
fn experts_that_drop_tokens_keep_sequences_from_sharing_prefixes() {
    use crate::layers::{Capacity, DropPolicy};
    let capacity = Some(Capacity { factor: 1.0, policy: DropPolicy::Position, pad: false });
    let why = |pattern: &str, moe_capacity| {
        let config = NemotronHConfig {
            hybrid_override_pattern: pattern.into(),
            moe_capacity,
            ..NemotronHConfig::nemotron_3_tiny()
        };
        assert_eq!(config.check(), Ok(()));
        config.unshared_prefixes()
    };
    assert_eq!(why("*E*E", capacity), Some(UnsharedPrefixes::Capacity));
    assert_eq!(why("*E*E", None), None);
    assert_eq!(why("*-*-", capacity), None, "there are no experts");
    assert_eq!([why("ME*E", capacity), why("M*", None)], [Some(UnsharedPrefixes::States); 2]);
}
