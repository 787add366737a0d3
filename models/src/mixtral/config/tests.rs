use super::*;

#[test]
fn layers_without_experts() {
    let qwen = MixtralConfig { num_hidden_layers: 6, ..MixtralConfig::qwen3_30b_a3b() };
    assert!(qwen.dense_layers().is_empty());
    let mixed = MixtralConfig { decoder_sparse_step: 2, mlp_only_layers: vec![3], ..qwen.clone() };
    assert_eq!(mixed.dense_layers(), [0, 2, 3, 4]);
    assert_eq!((mixed.dims().intermediate, qwen.dims().intermediate), (6144, 0));
}

#[test]
fn contradictory_sizes_are_refused() {
    let refuse = |config: MixtralConfig| config.check().unwrap_err().to_string();
    let tiny = MixtralConfig::tiny;
    assert_eq!(
        refuse(MixtralConfig { num_experts_per_tok: 5, ..tiny() }),
        "num_experts_per_tok = 5 is not at most num_experts; nearest legal: 4"
    );
    assert_eq!(
        refuse(MixtralConfig { mlp_only_layers: vec![1], ..tiny() }),
        "mlp_only_layers = 1: models with `variant = \"qwen2_moe\"` or `\"qwen3_moe\"` or `\"qwen3_next\"` have it, this model is mixtral; nearest legal: none"
    );
    assert!(refuse(MixtralConfig { num_key_value_heads: 3, ..tiny() }).contains("nearest legal: 2, 4"));
    assert!(refuse(MixtralConfig { num_experts: 0, ..tiny() }).contains("num_experts = 0 is not positive"));
    assert_eq!(tiny().check(), Ok(()));
    assert_eq!(MixtralConfig::qwen3_30b_a3b().check(), Ok(()));
}
