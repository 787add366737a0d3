//! Rotary embeddings in Hugging Face's `config.json`, as transformers 4 and 5 write them.

use models::layers::RopeScaling;
use models::{FamilyConfig, MixtralConfig, ModelConfig};
use serde_json::json;

use super::config_json::llama;
use crate::{GPT_OSS, LLAMA2, LLAMA3, MIXTRAL, PHI3_LONGROPE, QWEN3, QWEN3_MOE, parse};

/// As Microsoft writes it: the type was `su` at first, and the original context is a key of the model.
#[test]
fn longrope_is_read_in_both_forms() {
    let new = parse(PHI3_LONGROPE);
    let config = FamilyConfig::from_hf(&new).unwrap();
    assert_eq!(config.to_hf_like(&new).unwrap(), new);
    assert_eq!(FamilyConfig::from_hf(&config.to_hf().unwrap()).unwrap(), config);
    assert_eq!(serde_json::from_value::<FamilyConfig>(serde_json::to_value(&config).unwrap()).unwrap(), config);
    assert_eq!(config.cached_positions(), Some(16));
    for kind in ["su", "longrope"] {
        let mut old = new.clone();
        let rope = old.as_object_mut().unwrap().remove("rope_parameters").unwrap();
        old["rope_theta"] = json!(1e4);
        old["rope_scaling"] =
            json!({"type": kind, "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]});
        assert_eq!(FamilyConfig::from_hf(&old).unwrap(), config);
    }
}

/// transformers 4 wrote `rope_theta` and `rope_scaling` at the top level.
#[test]
fn older_rope_keys() {
    let mut config = parse(LLAMA3);
    let object = config.as_object_mut().unwrap();
    let mut rope = object.remove("rope_parameters").unwrap();
    object.insert("rope_theta".into(), rope.as_object_mut().unwrap().remove("rope_theta").unwrap());
    object.insert("rope_scaling".into(), rope);
    assert_eq!(FamilyConfig::from_hf(&config).unwrap(), FamilyConfig::Llama(llama(LLAMA3)));
}

/// Positions divided by a factor, as transformers 5 and 4 write it.
#[test]
fn linear_scaling_is_read_and_written() {
    for base in [LLAMA2, QWEN3, MIXTRAL] {
        let mut new = parse(base);
        new["rope_parameters"] = json!({"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0});
        let config = FamilyConfig::from_hf(&new).unwrap();
        assert_eq!(config.to_hf_like(&new).unwrap(), new);
        assert_eq!(serde_json::from_value::<FamilyConfig>(serde_json::to_value(&config).unwrap()).unwrap(), config);
        let mut old = parse(base);
        old.as_object_mut().unwrap().remove("rope_parameters");
        (old["rope_theta"], old["rope_scaling"]) = (json!(1e5), json!({"type": "linear", "factor": 4.0}));
        assert_eq!(FamilyConfig::from_hf(&old).unwrap(), config);
    }
    let shrunk = json!({"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5});
    let mut original = parse(LLAMA2);
    original["rope_parameters"] = shrunk;
    let said = FamilyConfig::from_hf(&original).unwrap_err().to_string();
    assert_eq!(said, "config.json: rope_scaling.factor = 0.5 is not at least 1; nearest legal: 1");
}

/// transformers gives a Mixtral another base than its relatives.
#[test]
fn without_a_rotary_base_each_family_has_its_own() {
    for (text, base) in [(LLAMA3, 1e4), (QWEN3, 1e4), (MIXTRAL, 1e6), (QWEN3_MOE, 1e4)] {
        let mut config = parse(text);
        config.as_object_mut().unwrap().retain(|key, _| key != "rope_parameters" && key != "rope_theta");
        match FamilyConfig::from_hf(&config).unwrap() {
            FamilyConfig::Llama(read) => assert_eq!(read.rope_theta, base, "{text}"),
            FamilyConfig::Mixtral(read) => assert_eq!(read.rope_theta, base, "{text}"),
            other => panic!("{other:?}"),
        }
    }
}

/// transformers' gpt-oss has YaRN where `config.json` has no rotary parameters, whatever the base; the base alone has its
/// own default.
#[test]
fn gpt_oss_without_rotary_parameters_has_yarn() {
    let published = MixtralConfig::gpt_oss_20b();
    let read = |keys: &[(&str, serde_json::Value)]| {
        let mut config = parse(GPT_OSS);
        config.as_object_mut().unwrap().remove("rope_parameters");
        keys.iter().for_each(|(key, value)| config[*key] = value.clone());
        let read = FamilyConfig::from_hf(&config).unwrap();
        assert_eq!(FamilyConfig::from_hf(&read.to_hf().unwrap()).unwrap(), read);
        assert_eq!(read.to_hf_like(&config).unwrap(), config);
        let FamilyConfig::Mixtral(read) = read else { panic!("{read:?}") };
        (read.rope_theta, read.rope_scaling)
    };
    let Some(RopeScaling::Yarn(yarn)) = published.rope_scaling else { panic!("{:?}", published.rope_scaling) };
    assert_eq!((yarn.factor, yarn.beta_fast, yarn.beta_slow, yarn.truncate), (32.0, 32.0, 1.0, false));
    assert_eq!(yarn.original_max_position_embeddings, 4096);
    assert_eq!(read(&[]), (150_000.0, published.rope_scaling));
    assert_eq!(read(&[("rope_theta", json!(1e4)), ("rope_scaling", json!(null))]), (1e4, published.rope_scaling));
    assert_eq!(read(&[("rope_parameters", json!({"rope_type": "default"}))]), (150_000.0, None));
}

/// YaRN in any family that rotates, with transformers' defaults and without them.
#[test]
fn yarn_is_read_and_written() {
    let keys = [
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        json!({"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5, "truncate": false}),
    ];
    for (base, rope) in [LLAMA2, QWEN3, MIXTRAL].into_iter().flat_map(|base| keys.iter().map(move |rope| (base, rope)))
    {
        let mut original = parse(base);
        original["rope_parameters"] = rope.clone();
        let config = FamilyConfig::from_hf(&original).unwrap();
        let written = config.to_hf().unwrap();
        assert_eq!(
            (&written["rope_parameters"]["rope_type"], &written["rope_parameters"]["factor"]),
            (&json!("yarn"), &json!(4.0))
        );
        assert_eq!(FamilyConfig::from_hf(&written).unwrap(), config);
        assert_eq!(serde_json::from_value::<FamilyConfig>(serde_json::to_value(&config).unwrap()).unwrap(), config);
    }
}
