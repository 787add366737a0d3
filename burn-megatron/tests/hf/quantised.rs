//! Weights in MXFP4 (gpt-oss) and in blocks of FP8 (DeepSeek-V3) are read as the bf16 that they stand for.

use std::fs;
use std::path::Path;

use burn_megatron::hf::HfFolder;
use half::bf16;
use models::{ModelConfig, WeightSource};
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::files::{Stored, Tensors, changed};

/// The bytes of a tensor, none of which repeats soon.
fn noise(count: usize, seed: usize) -> impl Iterator<Item = u8> {
    (0..count).map(move |index| ((index * 7919 + seed * 104_729) >> 3) as u8)
}

fn stored(dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Stored {
    Stored { dtype, shape: shape.to_vec(), data }
}

fn halves(values: impl Iterator<Item = f64>) -> Vec<u8> {
    values.flat_map(|value| bf16::from_f64(value).to_le_bytes()).collect()
}

/// A folder with `tensors`, whose `config.json` says how they are stored.
fn folder(model: &str, how: Value, change: impl FnOnce(&mut Tensors)) -> TempDir {
    let folder = changed(model, change);
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["quantization_config"] = how;
    fs::write(path, config.to_string()).unwrap();
    folder
}

fn mxfp4() -> Value {
    json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
}

fn fp8() -> Value {
    json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
}

/// Replaces the experts' matrices by blocks and scales, or by what these stand for.
fn with_mxfp4(tensors: &mut Tensors, packed: bool) {
    const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let names: Vec<String> =
        tensors.keys().filter(|name| name.ends_with("up_proj") || name.ends_with("down_proj")).cloned().collect();
    assert_eq!(names.len(), 8);
    for (seed, name) in names.into_iter().enumerate() {
        let [experts, inputs, outputs] = tensors.remove(&name).unwrap().shape[..] else { panic!("{name} is no stack") };
        let groups = inputs / 32;
        let blocks: Vec<u8> = noise(experts * outputs * groups * 16, seed).collect();
        let scales: Vec<u8> = noise(experts * outputs * groups, seed).map(|byte| 118 + byte % 12).collect();
        if packed {
            tensors.insert(format!("{name}_blocks"), stored(Dtype::U8, &[experts, outputs, groups, 16], blocks));
            tensors.insert(format!("{name}_scales"), stored(Dtype::U8, &[experts, outputs, groups], scales));
            continue;
        }
        let value = |index: usize| {
            let (expert, input, output) = (index / (inputs * outputs), index / outputs % inputs, index % outputs);
            let group = (expert * outputs + output) * groups + input / 32;
            let byte = blocks[group * 16 + input % 32 / 2];
            let nibble = if input % 2 == 0 { byte & 15 } else { byte >> 4 };
            let magnitude = VALUES[usize::from(nibble & 7)] * 2f64.powi(i32::from(scales[group]) - 127);
            if nibble & 8 == 0 { magnitude } else { -magnitude }
        };
        let data = halves((0..experts * inputs * outputs).map(value));
        tensors.insert(name, stored(Dtype::BF16, &[experts, inputs, outputs], data));
    }
}

/// The same for the matrices of DeepSeek-V3's layers and its output layer, which has two blocks of rows.
fn with_fp8(tensors: &mut Tensors, packed: bool) {
    let is_matrix = |name: &str| name.ends_with("_proj.weight") || name == "lm_head.weight";
    let names: Vec<String> = tensors.keys().filter(|name| is_matrix(name)).cloned().collect();
    assert!(names.len() > 10);
    for (seed, name) in names.into_iter().enumerate() {
        let [rows, columns] = tensors.remove(&name).unwrap().shape[..] else { panic!("{name} is no matrix") };
        // Without NaNs.
        let bytes: Vec<u8> =
            noise(rows * columns, seed).map(|byte| if byte & 127 == 127 { byte - 1 } else { byte }).collect();
        let shape = [rows.div_ceil(128), columns.div_ceil(128)];
        let scales: Vec<f32> = (0..shape[0] * shape[1]).map(|block| 0.001 * (block + 3) as f32).collect();
        if packed {
            tensors.insert(name.clone(), stored(Dtype::F8_E4M3, &[rows, columns], bytes));
            let scales = scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            tensors.insert(format!("{name}_scale_inv"), stored(Dtype::F32, &shape, scales));
            continue;
        }
        let value = |index: usize| {
            let byte = bytes[index];
            let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7) / 8.0);
            let magnitude = if exponent == 0 { mantissa / 64.0 } else { (1.0 + mantissa) * 2f32.powi(exponent - 7) };
            let scale = scales[index / columns / 128 * shape[1] + index % columns / 128];
            f64::from(if byte & 128 == 0 { magnitude * scale } else { -(magnitude * scale) })
        };
        let data = halves((0..rows * columns).map(value));
        tensors.insert(name, stored(Dtype::BF16, &[rows, columns], data));
    }
}

/// Both folders have the same weights, whole and in parts.
fn same(packed: &Path, plain: &Path) {
    let (packed, plain) = (HfFolder::open(packed).unwrap(), HfFolder::open(plain).unwrap());
    assert_eq!(packed.config(), plain.config());
    for (name, foreign) in packed.config().hf_names().iter() {
        let shape = foreign.our_shape();
        let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        let part: Vec<_> = shape.iter().map(|size| size / 3..*size - size / 4).collect();
        for ranges in [whole, part] {
            let of = |folder: &HfFolder| folder.read(name, &shape, &ranges).unwrap();
            assert_eq!(of(&packed), of(&plain), "{name} {ranges:?}");
        }
    }
}

#[test]
fn experts_in_mxfp4() {
    let packed = folder("gpt_oss", mxfp4(), |tensors| with_mxfp4(tensors, true));
    same(packed.path(), changed("gpt_oss", |tensors| with_mxfp4(tensors, false)).path());
}

#[test]
fn matrices_in_blocks_of_fp8() {
    let packed = folder("deepseek_v3", fp8(), |tensors| with_fp8(tensors, true));
    same(packed.path(), changed("deepseek_v3", |tensors| with_fp8(tensors, false)).path());
}

#[test]
fn other_forms_are_refused_by_name() {
    let refuse = |folder: TempDir| HfFolder::open(folder.path()).unwrap_err().to_string();
    let no_scales = folder("deepseek_v3", fp8(), |tensors| {
        with_fp8(tensors, true);
        tensors.remove("lm_head.weight_scale_inv");
    });
    assert!(refuse(no_scales).contains("lm_head.weight_scale_inv is missing"));
    let mut other = fp8();
    other["weight_block_size"] = json!([64, 128]);
    let said = refuse(folder("deepseek_v3", other, |tensors| with_fp8(tensors, true)));
    says!(said, "`weight_block_size` is [64, 128]", "nearest legal: [128, 128]");
    let said = refuse(folder("gpt_oss", json!({"quant_method": "awq"}), |_| {}));
    says!(said, "stored in awq");
    // Seven bits lie in words as eight do.
    let compressed = |key: &str, value: Value| {
        let mut weights = json!({"num_bits": 8, "type": "int", "symmetric": true, "strategy": "channel"});
        weights[key] = value;
        let groups = json!({"group_0": {"targets": ["Linear"], "weights": weights}});
        let how = json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups});
        ["llama3", "deepseek_v3"].map(|model| folder(model, how.clone(), |_| {}))
    };
    for folder in compressed("num_bits", json!(7)) {
        says!(
            refuse(folder),
            "`quantization_config.config_groups.group_0.weights.num_bits` is 7",
            "nearest legal: 4, 8"
        );
    }
    for folder in compressed("symmetric", json!(false)) {
        says!(refuse(folder), "config_groups.group_0.weights.symmetric` is false", "nearest legal: true");
    }
    for folder in compressed("num_bits", json!(4)) {
        HfFolder::open(folder.path()).unwrap();
    }
    let said = refuse(folder("gpt_oss", mxfp4(), |tensors| {
        with_mxfp4(tensors, true);
        let scales = tensors.get_mut("model.layers.1.mlp.experts.down_proj_scales").unwrap();
        (scales.shape[1], scales.data) = (scales.shape[1] / 2, scales.data[..scales.data.len() / 2].to_vec());
    }));
    says!(said, "model.layers.1.mlp.experts.down_proj", "is MXFP4 of blocks");
}
