//! `config.json` of relatives that are an entry of a table: what tells them from the others.

use models::{DecoderConfig, FamilyConfig, LlamaConfig, MixtralConfig, MixtralVariant};
use serde_json::json;

use crate::config_json::{llama, refuse};
use crate::{DEEPSEEK, DEEPSEEK_V2, ERNIE, GEMMA, GEMMA2, GEMMA3, GLM4, GRANITE, OLMO3, OLMOE, SEED_OSS, parse};

/// As Google published it, and as transformers reads and writes it.
#[test]
fn gemmas_gelu_is_the_approximation() {
    let mut old = parse(GEMMA);
    assert_eq!(old["hidden_act"], "gelu_pytorch_tanh");
    old["hidden_act"] = json!("gelu");
    assert_eq!(llama(&old.to_string()), llama(GEMMA));
    assert!(refuse(GEMMA2, "hidden_act", json!("gelu")).contains("nearest legal: gelu_pytorch_tanh"));
}

/// Layers with a window rotate with the same base and without scaling, whichever version of transformers wrote the file.
#[test]
fn olmo_3_scales_the_rotation_of_full_attention() {
    let olmo = llama(OLMO3);
    let rope = |layer| olmo.attention(layer).rope.unwrap();
    assert_eq!((olmo.rope_theta, olmo.rope_local_base_freq), (5e5, None));
    assert!(rope(0).scaling.is_none() && rope(3).scaling.is_some() && rope(0).theta == rope(3).theta);
    let mut old = parse(OLMO3);
    let keys = old.as_object_mut().unwrap();
    let mut scaling = keys.remove("rope_parameters").unwrap()["full_attention"].take();
    let theta = scaling.as_object_mut().unwrap().remove("rope_theta").unwrap();
    keys.extend([("rope_scaling".into(), scaling), ("rope_theta".into(), theta)]);
    keys.remove("layer_types");
    assert_eq!(llama(&old.to_string()), olmo);
}

/// transformers reads its defaults where a file does not name both kinds of layers: base 5·10⁵ and no scaling.
#[test]
fn rotary_parameters_of_both_kinds_are_named() {
    let flat = json!({"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0});
    for file in [OLMO3, GEMMA3] {
        let said = refuse(file, "rope_parameters", flat.clone());
        assert!(said.contains("nearest legal: full_attention and sliding_attention in it"), "{said}");
    }
    let both = json!({"full_attention": flat, "sliding_attention": flat});
    assert!(refuse(OLMO3, "rope_parameters", both.clone()).contains("scaled in sliding_attention"));
    let mut gemma = parse(GEMMA3);
    gemma["rope_parameters"] = both.clone();
    let gemma = llama(&gemma.to_string());
    assert_eq!(gemma.attention(0).rope, gemma.attention(3).rope);
    assert_eq!(gemma.to_hf()["rope_parameters"], both);
}

/// GLM-4's projections have biases unless the file says otherwise.
#[test]
fn glm_4_has_biases_by_default() {
    let mut file = parse(GLM4);
    file.as_object_mut().unwrap().remove("attention_bias");
    assert!(llama(&file.to_string()).attention_bias);
}

/// What a relative does not have is refused by name.
#[test]
fn keys_of_other_models_are_refused() {
    assert!(
        refuse(OLMOE, "clip_qkv", json!(8.0))
            .contains("`clip_qkv` is 8, which this model does not have; nearest legal: null")
    );
    assert!(refuse(ERNIE, "use_bias", json!(true)).contains("`use_bias` is true"));
    assert!(refuse(SEED_OSS, "attention_out_bias", json!(true)).contains("`attention_out_bias` is true"));
    assert!(
        refuse(GRANITE, "residual_multiplier", json!(0.0)).contains("residual_multiplier = 0 is not at least 0.001")
    );
    assert!(refuse(DEEPSEEK, "moe_layer_freq", json!(2)).contains("`moe_layer_freq` is 2"));
    assert!(refuse(DEEPSEEK_V2, "norm_topk_prob", json!(true)).contains("`norm_topk_prob` is true"));
    assert!(
        refuse(DEEPSEEK_V2, "topk_method", json!("noaux_tc")).contains("nearest legal: greedy, group_limited_greedy")
    );
    assert!(refuse(SEED_OSS, "residual_dropout", json!(2)).contains("`residual_dropout` is 2"));
}

/// Its code, which is not transformers', reads the rotary parameters of transformers 4.
#[test]
fn deepseeks_first_model_is_written_as_its_code_reads_it() {
    let read = |file: &serde_json::Value| MixtralConfig::from_hf(file, MixtralVariant::DeepSeek).unwrap();
    let mut file = parse(DEEPSEEK);
    file["rope_scaling"] = json!({"type": "linear", "factor": 4.0});
    let written = read(&file).to_hf();
    assert_eq!(written["rope_scaling"], file["rope_scaling"]);
    assert_eq!((&written["rope_theta"], &written["aux_loss_alpha"]), (&json!(1e4), &json!(0.001)));
    assert!(written.get("rope_parameters").is_none() && written.get("num_local_experts").is_none(), "{written}");
    assert_eq!(read(&written), read(&file));
}

/// A Granite without factors is one whose factors are 1, but for the scores'.
#[test]
fn factors_that_are_not_there_are_written_as_one() {
    let of =
        LlamaConfig { embedding_multiplier: None, attention_multiplier: None, logits_scaling: None, ..llama(GRANITE) };
    // The residual stream is divided by its factor whatever the other factors are.
    let embedding_scale = |of: &LlamaConfig| of.frame().embedding_scale;
    assert_eq!(embedding_scale(&of), Some(1.0 / 0.22));
    assert_eq!(embedding_scale(&LlamaConfig { residual_multiplier: None, ..of.clone() }), None);
    let written = FamilyConfig::Llama(of).to_hf().unwrap();
    let found = ["embedding_multiplier", "logits_scaling", "attention_multiplier"].map(|key| written[key].as_f64());
    assert_eq!(found, [Some(1.0), Some(1.0), Some(8f64.sqrt().recip())]);
}
