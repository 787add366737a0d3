//! What is wrong with a folder is said before anything starts; what is known to be harmless is passed over.

use std::fs;
use std::path::Path;

use burn_megatron::hf::{HfFolder, TensorReader};
use models::{ModelConfig, WeightSource};
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::files::{MODELS, Stored, changed, golden, read, shard, write};

fn refusal(folder: &Path) -> String {
    let message = HfFolder::open(folder).unwrap_err().to_string();
    message.replace(&folder.display().to_string(), "DIR")
}

const Q: &str = "model.layers.0.self_attn.q_proj.weight";

#[test]
fn tensors_that_do_not_fit_are_named() {
    let folder = changed("llama3", |tensors| drop(tensors.remove(Q)));
    assert_eq!(
        refusal(folder.path()),
        format!("DIR/model.safetensors: tensor `{Q}` is missing: config.json describes a model that has it")
    );
    let folder = changed("llama3", |tensors| drop(tensors.insert("model.extra".into(), Stored::f32(&[2], 1.0))));
    assert!(refusal(folder.path()).starts_with("DIR/model.safetensors: tensor `model.extra` is not part of the model"));
    let folder = changed("llama3", |tensors| drop(tensors.insert(Q.into(), Stored::f32(&[32, 16], 1.0))));
    assert_eq!(
        refusal(folder.path()),
        format!("DIR/model.safetensors: tensor `{Q}` has shape [32, 16], config.json needs [32, 32]")
    );
    let folder = changed("llama3", |tensors| tensors.get_mut(Q).unwrap().dtype = Dtype::I32);
    assert!(refusal(folder.path()).contains("has elements of type I32, weights can be F64, F32, BF16 or F16"));
}

#[test]
fn files_that_are_cut_off_or_missing_are_named() {
    let folder = changed("qwen3", |_| {});
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 4]).unwrap();
    let last = "model.norm.weight";
    let expected =
        format!("DIR/model.safetensors: tensor `{last}` is not complete: the file has {} bytes", bytes.len() - 4);
    assert!(refusal(folder.path()).starts_with(&expected), "{}", refusal(folder.path()));
    for length in [100, 5, 0] {
        fs::write(&path, &bytes[..length]).unwrap();
        let message = refusal(folder.path());
        assert!(message.starts_with("DIR/model.safetensors: is not complete") || length == 0, "{message}");
    }
    fs::write(&path, b"\x02\0\0\0\0\0\0\0no").unwrap();
    assert!(refusal(folder.path()).starts_with("DIR/model.safetensors: is no safetensors file"));
    fs::write(&path, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n").unwrap();
    assert!(
        refusal(folder.path()).starts_with("DIR/model.safetensors: is a pointer of Git LFS; fetch the file itself")
    );
    fs::remove_file(&path).unwrap();
    assert!(
        refusal(folder.path()).starts_with("DIR: holds neither model.safetensors nor model.safetensors.index.json")
    );
    fs::write(folder.path().join("pytorch_model.bin"), "").unwrap();
    assert!(refusal(folder.path()).starts_with("DIR: holds pytorch_model.bin in place of model.safetensors: pickled"));
    fs::remove_file(folder.path().join("config.json")).unwrap();
    assert_eq!(refusal(folder.path()), "DIR has no config.json, as a Hugging Face folder has; check the path");
}

#[test]
fn shards_must_be_those_of_the_index() {
    let folder = changed("mistral", |_| {});
    shard(folder.path());
    HfFolder::open(folder.path()).unwrap();
    let (first, second) = (folder.path().join("0.safetensors"), folder.path().join("1.safetensors"));

    fs::copy(golden("mistral").join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    assert!(refusal(folder.path()).starts_with("DIR: holds both model.safetensors and model.safetensors.index.json"));
    fs::remove_file(folder.path().join("model.safetensors")).unwrap();

    let mut tensors = read(&second);
    let (name, stored) = tensors.pop_first().unwrap();
    write(&second, &tensors);
    assert_eq!(
        refusal(folder.path()),
        format!(
            "DIR/1.safetensors: tensor `{name}` is missing, although model.safetensors.index.json says that it is here"
        )
    );
    tensors.insert(name, stored.clone());
    tensors.insert("stray".into(), stored);
    write(&second, &tensors);
    assert_eq!(refusal(folder.path()), "DIR/1.safetensors: tensor `stray` is not in model.safetensors.index.json");
    fs::remove_file(first).unwrap();
    let message = refusal(folder.path());
    assert!(
        message.starts_with("DIR/model.safetensors.index.json: tensor `lm_head.weight` should be in 0.safetensors")
    );
    says!(message, "not there");
}

#[test]
fn a_configuration_that_is_not_ours_is_refused_with_its_path() {
    let folder = changed("llama3", |_| {});
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = json!({"bits": 4});
    fs::write(&path, config.to_string()).unwrap();
    let message = refusal(folder.path());
    assert!(
        message.starts_with("DIR/config.json: `quantization_config` says that the weights are stored"),
        "{message}"
    );
    fs::write(&path, "{").unwrap();
    assert!(refusal(folder.path()).starts_with("DIR/config.json: EOF"));
}

/// Tables of rotary frequencies, causal masks, copies of tied weights, and GPT-2's names without prefix.
#[test]
fn known_extras_are_passed_over() {
    let folder = changed("llama2", |tensors| {
        let table = "model.layers.1.self_attn.rotary_emb.inv_freq";
        tensors.insert(table.into(), Stored::f32(&[2], 0.5));
        tensors.insert("lm_head.weight".into(), tensors["model.embed_tokens.weight"].clone());
    });
    HfFolder::open(folder.path()).unwrap();
    let folder =
        changed("llama2", |tensors| drop(tensors.insert("lm_head.weight".into(), Stored::f32(&[256, 32], 1.0))));
    assert!(
        refusal(folder.path()).contains("`lm_head.weight` differs from `model.embed_tokens.weight`, but config.json")
    );

    let folder = changed("gpt2", |tensors| {
        *tensors = std::mem::take(tensors)
            .into_iter()
            .map(|(name, stored)| (name.strip_prefix("transformer.").unwrap().to_string(), stored))
            .collect();
        tensors.insert("h.0.attn.bias".into(), Stored::f32(&[1, 1, 128, 128], 1.0));
        tensors.insert("h.3.attn.masked_bias".into(), Stored::f32(&[], -1e4));
        tensors.insert("lm_head.weight".into(), tensors["wte.weight"].clone());
    });
    let (bare, full) = (HfFolder::open(folder.path()).unwrap(), HfFolder::open(golden("gpt2")).unwrap());
    let box_of = |folder: &HfFolder| folder.read("embed_tokens.weight", &[256, 32], &[3..5, 0..32]).unwrap();
    assert_eq!(box_of(&bare), box_of(&full));
}

/// A box is the same part of the tensor whether the model is in one file or two, and whether it is stored transposed.
#[test]
fn a_box_is_read_alone() {
    for model in MODELS.split(' ') {
        let folder = changed(model, |_| {});
        shard(folder.path());
        let (single, sharded) = (HfFolder::open(golden(model)).unwrap(), HfFolder::open(folder.path()).unwrap());
        for (name, foreign) in single.config().hf_names().iter() {
            let shape = foreign.our_shape();
            if shape[0] < 3 {
                continue;
            }
            let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
            let all = single.read(name, &shape, &whole).unwrap();
            assert_eq!(all, sharded.read(name, &shape, &whole).unwrap(), "{model}: {name}");
            let row = all.len() / shape[0];
            let mut part = whole;
            part[0] = 1..3;
            assert_eq!(single.read(name, &shape, &part).unwrap(), all[row..3 * row], "{model}: {name}");
            if let [rows, columns] = shape[..] {
                let corner = single.read_bytes(name, &shape, &[rows - 1..rows, columns - 2..columns]).unwrap();
                let corner = corner.as_chunks::<4>().0.iter().map(|b| f64::from(f32::from_le_bytes(*b)));
                assert!(corner.eq(all[all.len() - 2..].iter().copied()), "{model}: {name}");
            }
        }
        let error = single.read("norm.weight", &[31], &[0..31]).unwrap_err().to_string();
        assert_eq!(error, "its shape is [32], the model needs [31]");
    }
}
