//! LLaVA with SigLIP's tower, whose sequence has no class token, and with a Qwen2.

use burn::tensor::{Device, Tensor};
use burn_megatron::hf::ModuleFolder;
use models::images::Llava;
use serde_json::Value;

use crate::images::equals_transformers;
use crate::images_generate::generates;
use crate::modules::{changed, round_trip};

/// Llama's norms are rounded to fp32 in transformers, and so are SigLIP's softmax and the loss.
#[test]
fn llava_with_the_tower_of_siglip_is_that_of_transformers() {
    equals_transformers("llava_siglip", &["TP1", "TP2", "TP2 SP"], 1e-6);
}

/// Transformers' `default` leaves out the first position, which in SigLIP is a patch.
#[test]
fn siglip_without_its_first_patch() {
    let folder = changed("llava_siglip", |file| file["vision_feature_select_strategy"] = "default".into(), |_| {});
    let config = ModuleFolder::open(folder.path()).unwrap().config::<Llava>().unwrap();
    assert_eq!((config.image_tokens(), config.vision_config.patches()), (3, 4));
    let model = Llava::new(&config, &Device::flex());
    assert_eq!(model.image_features(Tensor::ones([2, 3, 16, 16], &Device::flex())).dims(), [6, 16]);
}

/// Its logits are its embedding's.
#[test]
fn llava_with_a_qwen2_is_that_of_transformers() {
    equals_transformers("llava_qwen2", &["TP1", "TP2", "TP2 SP"], 1e-6);
}

#[test]
fn a_language_model_of_another_kind_is_refused() {
    let folder = changed("llava_qwen2", |file| file["text_config"]["model_type"] = "gemma2".into(), |_| {});
    let error = ModuleFolder::open(folder.path()).unwrap().config::<Llava>().unwrap_err().to_string();
    says!(error, "`text_config.model_type` is gemma2", "nearest legal: llama, qwen2");
}

#[test]
fn these_are_written_as_they_were_read() {
    round_trip::<Llava>("llava_siglip");
    round_trip::<Llava>("llava_qwen2");
}

#[test]
fn these_generate() {
    generates("llava_siglip", 96);
    generates("llava_qwen2", 96);
}

/// Transformers has one unless the file says no.
#[test]
fn a_pooling_head_is_refused() {
    let folder = changed("llava_siglip", |file| file["vision_config"]["vision_use_head"] = Value::Null, |_| {});
    let error = ModuleFolder::open(folder.path()).unwrap().config::<Llava>().unwrap_err().to_string();
    says!(error, "`vision_config.vision_use_head` is true, or absent,", "nearest legal: false");
}
