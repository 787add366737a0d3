//! SigLIP: image classification, and the tower with its pooling head.

use burn::tensor::{Device, FloatDType, Tensor};
use burn_megatron::forward::{forward_module, read_module_inputs};
use burn_megatron::hf::{ModuleExport, ModuleFolder};
use models::hf::ModuleInputs;
use models::images::{Siglip, SiglipConfig};
use serde_json::json;

use crate::files::{golden, read};
use crate::forward::difference;
use crate::images::{equals_transformers, inputs, pools_as_transformers};
use crate::modules::{changed, round_trip, run, settings};

#[test]
fn siglip_classifies_as_that_of_transformers() {
    equals_transformers("siglip", &["TP1", "TP2", "TP4", "TP2 SP"], 1e-9);
}

#[test]
fn the_pooling_head_is_that_of_transformers() {
    pools_as_transformers("siglip_vision");
}

/// The gradient of the images, through head and tower.
#[test]
fn gradients_of_the_pooling_head_are_those_of_transformers() {
    let (folder, device) = (ModuleFolder::open(golden("siglip_vision")).unwrap(), Device::flex().autodiff());
    let model: Siglip = folder.read(&folder.config::<Siglip>().unwrap(), FloatDType::F64, &device).unwrap();
    let file = golden("siglip_vision").join("oracle.safetensors");
    let tensors = read_module_inputs(&file).unwrap();
    let inputs = ModuleInputs { tensors, device, dtype: FloatDType::F64 };
    let pixels: Tensor<4> = inputs.floats("pixel_values").unwrap().require_grad();
    let pooled = model.pool(model.states(pixels.clone())).unwrap();
    let weights: Tensor<2> = inputs.floats("weights").unwrap();
    let gradient = pixels.grad(&(pooled * weights).sum().backward()).unwrap();
    let found: Vec<f64> = gradient.into_data().iter().collect();
    let gap = difference(&found, &read(&file)["pixel_grad"].values());
    assert!(gap < 1e-9, "{gap:e}");
}

#[test]
fn classifiers_are_written_as_they_were_read() {
    round_trip::<Siglip>("siglip");
}

/// transformers reads the tower under the names that it has in a whole model.
#[test]
fn towers_are_written_under_the_names_of_a_whole_model() {
    let (from, to) = (golden("siglip_vision"), tempfile::tempdir().unwrap());
    let folder = ModuleFolder::open(&from).unwrap();
    let config = folder.config::<Siglip>().unwrap();
    assert_eq!((config.num_labels, config.vision_use_head), (None, true));
    let model: Siglip = folder.read(&config, FloatDType::F64, &Device::flex()).unwrap();
    let to = to.path().join("written");
    ModuleExport::default().write(&to, &model, &config).unwrap();
    let before = read(&from.join("model.safetensors"));
    let renamed = before.into_iter().map(|(name, tensor)| (format!("vision_model.{name}"), tensor)).collect();
    assert!(read(&to.join("model.safetensors")) == renamed);
    let written = ModuleFolder::open(&to).unwrap();
    let outputs = forward_module(&written, &inputs("siglip_vision"), &settings("TP1", false)).unwrap();
    assert_eq!(outputs, run("siglip_vision", &inputs("siglip_vision"), "TP1", false).unwrap());
}

#[test]
fn what_siglip_does_not_have_is_named() {
    let refused = |change: fn(&mut serde_json::Value)| {
        let folder = changed("siglip", change, |_| {});
        ModuleFolder::open(folder.path()).unwrap().config::<Siglip>().unwrap_err().to_string()
    };
    for (error, texts) in [
        (refused(|file| file["id2label"] = json!({"0": "cat"})), ["`num_labels` is 1", "2: one label is for"]),
        (
            refused(|file| file["problem_type"] = "regression".into()),
            ["`problem_type` is regression", "single_label_classification"],
        ),
        (refused(|file| file["vision_config"]["patch_size"] = 3.into()), ["patch_size = 3", "nearest legal: 2, 4"]),
        (
            refused(|file| file["architectures"] = json!(["SiglipModel"])),
            ["SiglipModel", "SiglipForImageClassification"],
        ),
        (
            refused(|file| file["vision_config"]["model_type"] = "siglip2_vision_model".into()),
            ["`vision_config.model_type` is siglip2_vision_model", "siglip_vision_model"],
        ),
        (
            refused(|file| {
                let vision = file["vision_config"].as_object_mut().unwrap();
                vision.remove("vision_use_head");
                vision.insert("model_type".into(), "clip_vision_model".into());
            }),
            ["`vision_config.model_type` is clip_vision_model", "siglip_vision_model"],
        ),
    ] {
        assert!(texts.iter().all(|text| error.contains(text)), "{error}");
    }
    let labels = run("siglip_vision", &inputs("siglip"), "TP1", false).unwrap_err().to_string();
    assert!(labels.contains("is none that this model takes; legal: pixel_values"), "{labels}");
}

/// Without a head there is nothing to pool with, and a tower alone has no classes.
#[test]
fn parts_that_a_file_does_not_have() {
    let config = SiglipConfig { vision_use_head: false, num_labels: None, ..SiglipConfig::tiny() };
    let model = Siglip::new(&config, &Device::flex());
    let states = model.states(Tensor::ones([1, 3, 8, 8], &Device::flex()));
    assert!(model.pool(states.clone()).is_none() && model.classify(states).is_none() && model.classes().is_none());
}
