//! ViT and LLaVA: computed with as transformers does in tensor and sequence parallelism, read and written.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_megatron::forward::{forward_module, read_module_inputs};
use burn_megatron::hf::{ModuleExport, ModuleFolder};
use models::hf::{HostInput, ModuleInputs};
use models::images::{Llava, Vit};
use serde_json::{Value, json};

use crate::files::{Stored, golden, read};
use crate::forward::difference;
use crate::modules::{Inputs, changed, gradients_equal, last8, logits, round_trip, run, settings};

/// Logits and loss within `limit` of those of transformers, gradients within 1e-6.
pub fn equals_transformers(model: &str, layouts: &[&str], limit: f64) {
    let oracle = read(&golden(model).join("oracle.safetensors"));
    let inputs = inputs(model);
    for layout in layouts {
        let outputs = run(model, &inputs, layout, true).unwrap();
        let (found, expected) = match oracle.get("logits_last8") {
            Some(expected) => (last8(logits(&outputs)), expected.values()),
            None => (logits(&outputs).data.clone(), oracle["logits"].values()),
        };
        let gap = difference(&found, &expected);
        println!("{model} {layout}: logits {gap:e}");
        assert!(gap < limit, "{model} {layout}: logits {gap:e}");
        let gap = difference(outputs.loss.as_slice(), &oracle["loss"].values());
        println!("{model} {layout}: loss {gap:e}");
        assert!(gap < limit, "{model} {layout}: loss {gap:e}");
        // Where transformers rounds the softmax to fp32, 5e-11 is left of a gradient that is zero.
        let compared = gradients_equal((model, layout), &outputs, &oracle, 1e-10);
        assert!(compared > 40, "{compared}");
    }
}

/// The hidden states and what is pooled of them, within 1e-9 of those of transformers.
pub fn pools_as_transformers(model: &str) {
    let oracle = read(&golden(model).join("oracle.safetensors"));
    for layout in ["TP1", "TP2", "TP2 SP"] {
        let outputs = run(model, &inputs(model), layout, false).unwrap();
        let names: Vec<&str> = outputs.tensors.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["last_hidden_state", "pooler_output"]);
        for (name, tensor) in &outputs.tensors {
            assert_eq!(tensor.shape, oracle[name].shape, "{name}");
            let gap = difference(&tensor.data, &oracle[name].values());
            assert!(gap < 1e-9, "{layout}: {name} {gap:e}");
        }
    }
}

pub fn inputs(model: &str) -> Inputs {
    let mut inputs = read_module_inputs(&golden(model).join("oracle.safetensors")).unwrap();
    let taken = ["pixel_values", "labels", "input_ids", "token_type_ids", "attention_mask"];
    inputs.retain(|name, _| taken.contains(&name.as_str()));
    inputs
}

#[test]
fn vit_is_that_of_transformers() {
    equals_transformers("vit", &["TP1", "TP2", "TP4", "TP2 SP"], 1e-9);
}

/// Llama's norms are rounded to fp32 in transformers, and so is the loss.
#[test]
fn llava_is_that_of_transformers() {
    equals_transformers("llava", &["TP1", "TP2", "TP2 SP"], 1e-6);
}

/// A mask without padding changes nothing, and the image token has two names.
#[test]
fn other_words_for_the_same() {
    let mut masked = inputs("llava");
    masked.insert("attention_mask".into(), HostInput::Ints { shape: vec![2, 24], data: vec![1; 48] });
    let expected = run("llava", &inputs("llava"), "TP1", false).unwrap();
    assert_eq!(run("llava", &masked, "TP1", false).unwrap(), expected);
    for change in [
        |file: &mut Value| file["image_token_id"] = Value::Null,
        |file: &mut Value| file["image_token_id"] = file["image_token_index"].clone(),
        |file: &mut Value| file["image_token_id"] = file["image_token_index"].take(),
    ] {
        let folder = changed("llava", change, |_| {});
        assert_eq!(ModuleFolder::open(folder.path()).unwrap().config::<Llava>().unwrap().image_token_index, 159);
    }
    // The window of no layer.
    let folder = changed("llava_qwen2", |file| windowed(file, 2), |_| {});
    assert!(ModuleFolder::open(folder.path()).unwrap().config::<Llava>().is_ok());
    let folder = changed("vit", |file| file["problem_type"] = "single_label_classification".into(), |_| {});
    assert!(ModuleFolder::open(folder.path()).unwrap().config::<Vit>().is_ok());
}

#[test]
fn vision_models_are_written_as_they_were_read() {
    round_trip::<Vit>("vit");
    round_trip::<Llava>("llava");
}

/// Layers from this one on have a window.
fn windowed(file: &mut Value, first: usize) {
    let text = &mut file["text_config"];
    let kind = |layer| if layer < first { "full_attention" } else { "sliding_attention" };
    (text["use_sliding_window"], text["sliding_window"]) = (true.into(), 8.into());
    (text["max_window_layers"], text["layer_types"]) = (first.into(), json!([kind(0), kind(1)]));
}

#[test]
fn what_does_not_fit_is_named() {
    let refused = |model: &str, change: &dyn Fn(&mut Value)| {
        let folder = changed(model, change, |_| {});
        let opened = ModuleFolder::open(folder.path()).unwrap();
        forward_module(&opened, &inputs(model), &settings("TP1", false)).unwrap_err().to_string()
    };
    for (error, texts) in [
        (
            refused("llava", &|file| file["text_config"]["tie_word_embeddings"] = true.into()),
            ["`language_model.lm_head.weight` differs from", "has them tied"],
        ),
        (refused("vit", &|file| file["patch_size"] = 3.into()), ["patch_size = 3", "nearest legal: 2, 4"]),
        (refused("vit", &|file| file["hidden_act"] = "mish".into()), ["`hidden_act` is mish", "quick_gelu"]),
        (
            refused("vit", &|file| file["hidden_dropout_prob"] = 0.1.into()),
            ["`hidden_dropout_prob` is 0.1", "legal: 0"],
        ),
        (
            refused("vit", &|file| file["problem_type"] = "multi_label_classification".into()),
            ["`problem_type` is multi_label_classification", "single_label_classification"],
        ),
        (refused("vit", &|file| file["id2label"] = json!({"0": "cat"})), ["`num_labels` is 1", "2: one label is for"]),
        (
            refused("llava", &|file| file["image_token_id"] = 7.into()),
            ["`image_token_id` is 7", "159, as `image_token_index`"],
        ),
        (refused("vit", &|file| file["image_size"] = 24.into()), ["position_embeddings", "needs [1, 37, 32]"]),
        (refused("llava", &|file| file["image_token_index"] = 160.into()), ["image_token_index = 160", "159"]),
        (
            refused("llava", &|file| file["vision_feature_layer"] = json!([-2])),
            ["`vision_feature_layer` is [-2]", "a number"],
        ),
        (
            refused("llava", &|file| file["vision_config"]["hidden_size"] = 0.into()),
            ["`vision_config.hidden_size` is 0", "positive"],
        ),
        (refused("llava", &|file| file["text_config"]["novel"] = 1.into()), ["`text_config.novel`", "known"]),
        (
            refused("llava", &|file| file["text_config"]["model_type"] = "mistral".into()),
            ["`text_config.model_type`", "llama"],
        ),
        // It was computed without the window.
        (
            refused("llava_qwen2", &|file| windowed(file, 1)),
            ["text_config.sliding_window = 8: language models without images", "nearest legal: none"],
        ),
        (
            refused("llava", &|file| file["vision_config"]["model_type"] = "siglip2_vision_model".into()),
            ["`vision_config.model_type` is siglip2_vision_model", "clip_vision_model, siglip_vision_model"],
        ),
    ] {
        assert!(texts.iter().all(|text| error.contains(text)), "{error}");
    }
}

#[test]
fn images_and_image_tokens_that_do_not_fit_are_named() {
    let with = |model: &str, name: &str, tensor: HostInput| {
        let mut inputs = inputs(model);
        inputs.insert(name.into(), tensor);
        run(model, &inputs, "TP1", false).unwrap_err().to_string()
    };
    let floats = |shape: &[usize]| {
        let data = vec![0.5; shape.iter().product()];
        HostInput::Floats(backend_dist::shard::HostTensor { shape: shape.into(), data })
    };
    let ints = |shape: &[usize], value: i64| HostInput::Ints {
        shape: shape.into(),
        data: vec![value; shape.iter().product()],
    };
    let first =
        HostInput::Ints { shape: vec![2, 24], data: (0..48).map(|at| if at % 24 == 0 { 5 } else { -100 }).collect() };
    for (error, text) in [
        (with("vit", "pixel_values", floats(&[2, 3, 16, 8])), "shape [2, 3, 16, 8]; legal: [2, 3, 16, 16]"),
        (with("vit", "labels", ints(&[2], 7)), "tensor `labels` has 7 at [0]; legal: 0 to 6"),
        (with("llava", "pixel_values", floats(&[2, 1, 16, 16])), "legal: [2, 3, 16, 16]"),
        (with("llava", "pixel_values", floats(&[1, 3, 16, 16])), "`input_ids` has 8 times token 159; legal: 4"),
        (with("llava", "attention_mask", ints(&[2, 24], 0)), "tensor `attention_mask` has 0 at [0, 0]; legal: 1"),
        (
            with("vit", "bool_masked_pos", ints(&[2, 4], 0)),
            "is none that this model takes; legal: pixel_values, labels",
        ),
        (with("llava", "labels", first), "every label of `labels` but the first of a sequence is -100"),
        (with("llava", "input_ids", ints(&[2, 24], 5)), "`input_ids` has 0 times token 159; legal: 8"),
    ] {
        says!(error, text);
    }
}

/// Heads are the least that tensor parallelism can divide.
#[test]
fn heads_that_ranks_do_not_divide_are_named() {
    for (model, layout, text) in [
        ("vit", "TP8", "`blocks.0.attention` has 4 heads (`n_heads`), which 8 ranks"),
        ("llava", "TP8", "`tower.blocks.0.attention` has 4 heads (`n_heads`), which 8 ranks"),
        ("llava", "TP4", "`decoder.blocks.0.attention` has 2 heads (`n_heads_kv`), which 4 ranks"),
    ] {
        says!(run(model, &inputs(model), layout, false).unwrap_err(), text);
    }
}

/// `-2` is what comes out of the last block but one, and `full` begins with the class token.
#[test]
fn features_are_those_that_the_file_asks_for() {
    let device = Device::flex();
    let open = |layer: i64, strategy: &str| -> Llava {
        let keys = |file: &mut Value| {
            file["vision_feature_layer"] = layer.into();
            file["vision_feature_select_strategy"] = strategy.into();
        };
        let folder = changed("llava", keys, |_| {});
        let opened = ModuleFolder::open(folder.path()).unwrap();
        opened.read(&opened.config::<Llava>().unwrap(), FloatDType::F64, &device).unwrap()
    };
    let inputs = ModuleInputs { tensors: inputs("llava"), device: device.clone(), dtype: FloatDType::F64 };
    let pixels = || inputs.floats::<4>("pixel_values").unwrap();
    let values = |x: Tensor<3>| -> Vec<f64> { x.into_data().iter::<f64>().collect() };
    // The tower has two blocks: its states are those before them, between them and after them.
    let last_but_one = open(-2, "default");
    let tower = last_but_one.tower();
    let states = tower.block(0, tower.embed(pixels()));
    let [images, length, hidden] = states.dims();
    let by_hand = last_but_one.project(states.clone()).reshape([images as i32, length as i32 - 1, -1]);
    for (model, first) in [(&last_but_one, 1), (&open(-2, "full"), 0)] {
        let features = model.image_features(pixels()).reshape([images as i32, (length - first) as i32, -1]);
        assert_eq!(model.image_tokens(), length - first);
        let patches = features.clone().narrow(1, 1 - first, length - 1);
        assert_eq!(values(patches), values(by_hand.clone()));
        if first == 0 {
            // The class token, through the projector as if it were the only patch.
            let class = states.clone().narrow(1, 0, 1);
            let nothing = Tensor::zeros([images, 1, hidden], (&device, states.dtype()));
            let class = last_but_one.project(Tensor::cat(vec![nothing, class], 1)).reshape([images as i32, 1, -1]);
            assert_eq!(values(features.narrow(1, 0, 1)), values(class));
        }
    }
    assert_ne!(values(by_hand), values(open(-1, "default").image_features(pixels()).unsqueeze()));
}

/// Names of the tensors as published folders have them.
#[test]
fn older_folders_of_llava() {
    let nested = |name: &str| name.replace("vision_tower.", "vision_tower.vision_model.");
    let one_part = |name: &str| match name.strip_prefix("language_model.") {
        Some(rest) if rest.starts_with("lm_head") => rest.to_string(),
        Some(rest) => rest.replacen("model.", "model.language_model.", 1),
        None => format!("model.{name}"),
    };
    let renames: [&dyn Fn(&str) -> String; 3] = [&nested, &one_part, &|name| one_part(&nested(name))];
    for rename in renames {
        let folder = changed(
            "llava",
            |_| {},
            |tensors| {
                *tensors = std::mem::take(tensors).into_iter().map(|(name, tensor)| (rename(&name), tensor)).collect();
                tensors.insert(rename("vision_tower.embeddings.position_ids"), Stored::f32(&[1, 5], 0.0));
            },
        );
        let opened = ModuleFolder::open(folder.path()).unwrap();
        let outputs = forward_module(&opened, &inputs("llava"), &settings("TP1", false)).unwrap();
        let expected = run("llava", &inputs("llava"), "TP1", false).unwrap();
        assert!(logits(&outputs) == logits(&expected));
        // They are written under today's names.
        let config = opened.config::<Llava>().unwrap();
        let model: Llava = opened.read(&config, FloatDType::F64, &Device::flex()).unwrap();
        let to = folder.path().join("written");
        ModuleExport::default().write(&to, &model, &config).unwrap();
        assert!(read(&to.join("model.safetensors")) == read(&golden("llava").join("model.safetensors")));
    }
}
