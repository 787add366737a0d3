use serde_json::json;

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

/// The published files have a coefficient of 0.9 and `output_router_logits: false`: transformers trains without a
/// load-balancing loss then. It was trained with here.
#[test]
fn gpt_oss_has_the_load_balancing_loss_that_its_file_asks_for() {
    assert_eq!(MixtralConfig::gpt_oss_120b().router_aux_loss_coef, 0.0);
    let published = MixtralConfig { router_aux_loss_coef: 0.9, ..MixtralConfig::gpt_oss_20b() };
    let file = |flag: serde_json::Value, coefficient: serde_json::Value| {
        let mut file = published.to_hf();
        (file["output_router_logits"], file["router_aux_loss_coef"]) = (flag, coefficient);
        file
    };
    let null = || serde_json::Value::Null;
    for (flag, coefficient, expected) in [
        (json!(false), json!(0.9), 0.0),
        (null(), json!(0.9), 0.0),
        (json!(true), json!(0.9), 0.9),
        (json!(true), json!(0.05), 0.05),
        (json!(true), null(), 0.9),
        (json!(true), json!(0.0), 0.0),
    ] {
        let read = MixtralConfig::from_hf(&file(flag, coefficient), MixtralVariant::GptOss).unwrap();
        assert_eq!((read.router_aux_loss_coef, read.experts().router.balance.is_some()), (expected, expected != 0.0));
        // What transformers reads trains with this loss too, and is the same here.
        let written = read.to_hf();
        assert_eq!(
            (&written["output_router_logits"], &written["router_aux_loss_coef"]),
            (&json!(expected != 0.0), &json!(expected))
        );
        assert_eq!(MixtralConfig::from_hf(&written, MixtralVariant::GptOss).unwrap(), read);
    }
    // Megatron-Bridge trains the others with the loss whatever their files say.
    let mut mixtral = MixtralConfig::mixtral_8x7b().to_hf();
    mixtral["output_router_logits"] = json!(false);
    assert_eq!(MixtralConfig::from_hf(&mixtral, MixtralVariant::Mixtral).unwrap().router_aux_loss_coef, 0.02);
}
