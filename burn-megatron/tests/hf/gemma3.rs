//! Of a published Gemma 3 with images the language model is read, which is said, and written as a folder of its own.

use std::fs;
use std::path::Path;

use burn_megatron::hf::HfFolder;

use crate::files::{Stored, changed, golden, read};
use crate::forward::difference;
use crate::round_trip::{command, fail, succeed, text};

const IMAGES: &str = "of this Gemma 3 the language model is read; 23 tensors for images";

/// Logits of a folder, and what the command said.
fn logits(folder: &Path, output: &Path) -> (Vec<f64>, String) {
    let input = golden("gemma3_images").join("oracle.safetensors");
    let words = ["forward", "--hf", text(folder), "--input", text(&input), "--output", text(output), "--dtype", "f64"];
    let said = command(&words);
    assert!(said.status.success(), "{said:?}");
    (read(output)["logits"].values(), String::from_utf8(said.stderr).unwrap())
}

#[test]
fn both_spellings_and_the_export_compute_the_same() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let (published, said) = logits(&golden("gemma3_images"), &at("published.safetensors"));
    assert_eq!(said.matches(IMAGES).count(), 1, "{said}");
    let in_memory = changed("gemma3_images", |tensors| {
        let renamed = |name: String| match name.strip_prefix("language_model.model.") {
            Some(rest) => format!("model.language_model.{rest}"),
            None => format!("model.{name}"),
        };
        *tensors = std::mem::take(tensors).into_iter().map(|(name, stored)| (renamed(name), stored)).collect();
        tensors.insert("lm_head.weight".into(), tensors["model.language_model.embed_tokens.weight"].clone());
    });
    let (spelt_otherwise, said) = logits(in_memory.path(), &at("in_memory.safetensors"));
    says!(said, IMAGES);
    assert_eq!(spelt_otherwise, published);

    let (checkpoint, exported) = (at("checkpoint"), at("exported"));
    let imported = command(&["import", "--hf", text(&golden("gemma3_images")), "--output", text(&checkpoint)]);
    says!(String::from_utf8(imported.stderr).unwrap(), "what is written of it is a `gemma3_text` folder");
    succeed(&["export", "--checkpoint", text(&checkpoint), "--hf", text(&exported)]);
    let config: serde_json::Value = serde_json::from_slice(&fs::read(exported.join("config.json")).unwrap()).unwrap();
    assert_eq!(
        (&config["model_type"], &config["architectures"][0]),
        (&"gemma3_text".into(), &"Gemma3ForCausalLM".into())
    );
    assert!(read(&exported.join("model.safetensors")).keys().all(|name| name.starts_with("model.")));
    let (from_export, said) = logits(&exported, &at("export.safetensors"));
    assert_eq!((from_export, said.as_str()), (published.clone(), ""));
    let oracle = read(&golden("gemma3_images").join("oracle.safetensors"));
    let size = published.len() / 2;
    let last: Vec<f64> = published.chunks(size).flat_map(|of| &of[size - 8 * 160..]).copied().collect();
    assert!(difference(&last, &oracle["logits_last8"].values()) < 1e-13);
}

#[test]
fn what_is_not_of_the_language_model_is_refused_or_said() {
    let folder =
        changed("gemma3_images", |tensors| drop(tensors.insert("audio_tower.a".into(), Stored::f32(&[2], 1.0))));
    says!(HfFolder::open(folder.path()).unwrap_err(), "tensor `audio_tower.a` is not part of the model");
    let folder = changed("gemma3_images", |tensors| {
        tensors.insert("model.language_model.norm.weight".into(), Stored::f32(&[16], 1.0));
    });
    let twice = HfFolder::open(folder.path()).unwrap_err();
    says!(twice, "`model.language_model.norm.weight` is there twice, also as `language_model.model.norm.weight`");
    assert_eq!(HfFolder::open(golden("gemma3")).unwrap().left_out(), None);
    let (root, images) = (tempfile::tempdir().unwrap(), golden("vit").join("oracle.safetensors"));
    let output = root.path().join("out.safetensors");
    let folder = golden("gemma3_images");
    let message = fail(&["forward", "--hf", text(&folder), "--input", text(&images), "--output", text(&output)]);
    says!(message, "tensor `pixel_values`: this model reads no images; legal: input_ids, labels");
}
