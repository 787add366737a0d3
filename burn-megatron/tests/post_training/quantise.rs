//! `export --quantize`: what is written is compressed-tensors', what is read again is what was written, and GPTQ's layers
//! are nearer to the model than rounded ones.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use burn_megatron::calibrate::Calibration;
use burn_megatron::forward::{Input, Settings, forward};
use burn_megatron::hf::HfFolder;
use models::observer::Moments;
use models::{ModelConfig, WeightSource};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use tempfile::TempDir;

use super::eval::model;
use super::{fail, succeed};

/// What reads these sequences.
pub fn calibration<'a>(base: &'a HfFolder, sequences: &'a [Vec<i64>], device: &'a Device) -> Calibration<'a> {
    Calibration { config: base.config(), source: base, sequences, device, dtype: FloatDType::F32 }
}

/// A model with a tokenizer, and texts.
fn folder() -> TempDir {
    let folder = TempDir::new().unwrap();
    let base = folder.path().join("base");
    fs::create_dir(&base).unwrap();
    model(&base);
    let text = |seed: usize| (0..600).map(|at| format!("w{} ", (at * at * seed + 7 * at) % 160)).collect::<String>();
    fs::write(folder.path().join("calibration.txt"), text(3)).unwrap();
    fs::write(folder.path().join("text.txt"), text(5)).unwrap();
    folder
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// The tensors of a folder as our reader gives them, by our names.
pub(super) fn weights(folder: &Path) -> BTreeMap<String, Vec<f64>> {
    let folder = HfFolder::open(folder).unwrap();
    let read = |(name, foreign): (&str, &models::names::Foreign)| {
        let shape = foreign.our_shape();
        let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        (name.to_string(), folder.read(name, &shape, &whole).unwrap())
    };
    folder.config().hf_names().iter().map(read).collect()
}

/// Bytes of a raw tensor.
fn raw(folder: &Path, name: &str) -> (Dtype, Vec<usize>, Vec<u8>) {
    let bytes = fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).unwrap_or_else(|_| panic!("{name} is not in {:?}", file.names()));
    (view.dtype(), view.shape().to_vec(), view.data().to_vec())
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.chunks_exact(4).map(|bytes| f64::from(f32::from_le_bytes(bytes.try_into().unwrap()))).collect()
}

const LAYER: &str = "model.layers.1.mlp.down_proj.weight";
const OURS: &str = "layers.1.mlp.down_proj";

#[test]
fn what_is_written_is_read_again() {
    let folder = folder();
    let original = weights(&folder.path().join("base"));
    for (numbers, flags, bound) in
        [("fp8", "", 0.04), ("int8", "", 0.01), ("int4", "--group-size 16", 0.12), ("int4", "--group-size 32", 0.14)]
    {
        let to = format!("{numbers}{}", flags.replace(' ', ""));
        let said = succeed(
            folder.path(),
            &format!("export --from-hf base --hf {to} --dtype f32 --quantize {numbers} {flags}"),
        );
        says!(said, "28 matrices in few bits, 0 of them by GPTQ");
        let path = folder.path().join(&to);
        let read = weights(&path);
        for (name, values) in &original {
            let is_linear = name.contains("_proj");
            match super::gap(&read[name], values) {
                gap if is_linear => assert!(gap > 1e-4 && gap < bound, "{to}: {name} is {gap} off"),
                gap => assert_eq!(gap, 0.0, "{to}: {name}"),
            }
        }

        // The definition, from the file's bytes.
        let (_, shape, scales) = raw(&path, &format!("{LAYER}_scale"));
        let scales = floats(&scales);
        let columns = original[&format!("{OURS}.weight")].len() / shape[0];
        let scale = |at: usize| scales[at / columns * shape[1] + at % columns * shape[1] / columns];
        let config = &json(&path.join("config.json"))["quantization_config"];
        let group = &config["config_groups"]["group_0"];
        assert_eq!((&group["targets"][0], &config["ignore"][0]), (&"Linear".into(), &"lm_head".into()));
        let values: Vec<f64> = match numbers {
            "fp8" => {
                let (dtype, found, codes) = raw(&path, LAYER);
                assert_eq!((dtype, found), (Dtype::F8_E4M3, vec![shape[0], columns]));
                assert_eq!(
                    (&config["format"], &group["weights"]["type"]),
                    (&"naive-quantized".into(), &"float".into())
                );
                let value = |(at, code): (usize, &u8)| f64::from(burn_megatron::quantise::e4m3(*code)) * scale(at);
                codes.iter().enumerate().map(value).collect()
            }
            _ => {
                let bits = if numbers == "int8" { 8 } else { 4 };
                let (dtype, found, words) = raw(&path, &format!("{LAYER}_packed"));
                assert_eq!((dtype, found), (Dtype::I32, vec![shape[0], columns * bits / 32]));
                let (dtype, _, sizes) = raw(&path, &format!("{LAYER}_shape"));
                let sizes: Vec<i64> =
                    sizes.chunks(8).map(|size| i64::from_le_bytes(size.try_into().unwrap())).collect();
                assert_eq!((dtype, sizes), (Dtype::I64, vec![shape[0] as i64, columns as i64]));
                assert_eq!(group["weights"]["num_bits"], bits);
                let value = |at: usize| {
                    let byte = words[at * bits / 8];
                    let code = if bits == 8 { i32::from(byte) } else { i32::from(byte >> (at % 2 * 4) & 15) };
                    f64::from(code - (1 << (bits - 1))) * scale(at)
                };
                (0..shape[0] * columns).map(value).collect()
            }
        };
        assert!(super::gap(&read[&format!("{OURS}.weight")], &values) < 1e-7, "{to}");
    }
}

/// The layer as compressed-tensors itself quantises and packs it, and the logits that transformers computes from what we
/// write.
#[test]
fn transformers_and_compressed_tensors_agree() {
    let folder = folder();
    let path = super::golden("compressed/oracle.safetensors");
    let bytes = fs::read(&path).unwrap();
    let oracle = SafeTensors::deserialize(&bytes).unwrap();
    let ids = oracle.tensor("input_ids").unwrap();
    let ids: Vec<i64> = ids.data().chunks(8).map(|id| i64::from_le_bytes(id.try_into().unwrap())).collect();
    for numbers in ["fp8", "int8", "int4"] {
        let group = if numbers == "int4" { "--group-size 16" } else { "" };
        succeed(folder.path(), &format!("export --from-hf base --hf {numbers} --quantize {numbers} {group}"));
        let to = folder.path().join(numbers);
        let mut parts = 0;
        for name in oracle.names() {
            let Some(part) = name.strip_prefix(&format!("{numbers}.weight")) else { continue };
            let (expected, found) = (oracle.tensor(name).unwrap(), raw(&to, &format!("{LAYER}{part}")));
            assert_eq!((expected.dtype(), expected.shape()), (found.0, &found.1[..]), "{name}");
            assert!(expected.data() == found.2, "{name}");
            parts += 1;
        }
        assert_eq!(parts, if numbers == "fp8" { 2 } else { 3 });
        let source = HfFolder::open(&to).unwrap();
        let settings = Settings::new([Device::flex()], "TP2".parse().unwrap(), FloatDType::F32);
        let input = Input { sequences: 1, seq: ids.len(), ids: ids.clone(), labels: None };
        let logits = forward(source.config(), &source, &input, &settings).unwrap().logits;
        let expected = floats(oracle.tensor(&format!("{numbers}.logits")).unwrap().data());
        let gap = super::gap(&logits, &expected);
        assert!(gap < 1e-5, "{numbers}: {gap}");
    }
}

/// Fused layers, experts, latents and linear attention; what is no linear layer stays as it is.
#[test]
fn every_family_is_read_again() {
    let folder = TempDir::new().unwrap();
    for family in
        ["qwen2", "qwen3", "phi3", "gemma3", "olmo2", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "nemotron3"]
    {
        let from = super::golden(&format!("hf/{family}"));
        for numbers in ["int8", "fp8"] {
            let to = format!("{family}-{numbers}");
            let flags = format!("--from-hf {} --hf {to} --quantize {numbers} --max-shard-size 60KB", from.display());
            succeed(folder.path(), &format!("export {flags}"));
            let (before, after) = (weights(&from), weights(&folder.path().join(&to)));
            let mut changed = 0;
            for (name, values) in &before {
                let gap = if after[name] == *values { 0.0 } else { super::gap(&after[name], values) };
                assert!(gap < 0.05, "{to}: {name} {gap}");
                changed += usize::from(gap > 0.0);
                let is_kept = ["norm", "embed", "lm_head", "router", "bias", ".gate.weight"];
                assert!(gap == 0.0 || is_kept.iter().all(|kept| !name.contains(kept)), "{to}: {name} {gap}");
            }
            assert!(changed >= 8, "{to}: {changed} changed");
        }
    }
    let gpt2 = super::golden("hf/gpt2").display().to_string();
    let said = fail(folder.path(), &format!("export --from-hf {gpt2} --hf none --quantize int8"));
    says!(said, "no matrix of this model as a linear layer's");
}

#[test]
fn a_checkpoint_is_quantised_as_its_folder() {
    let folder = folder();
    succeed(folder.path(), "import --hf base --checkpoint checkpoints");
    let flags = "--quantize int4 --group-size 32 --method gptq --calibration calibration.txt --max-length 64";
    succeed(folder.path(), &format!("export --checkpoint checkpoints --hf first {flags}"));
    succeed(folder.path(), &format!("export --from-hf base --hf second {flags}"));
    let [first, second] =
        ["first", "second"].map(|name| fs::read(folder.path().join(name).join("model.safetensors")).unwrap());
    assert!(first == second);
    let rest: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(rest.len(), 6, "{rest:?}");
    let said = fail(folder.path(), "export --checkpoint checkpoints --hf third --perplexity text.txt");
    says!(said, "--calibration and --perplexity are for --quantize");
    let said = fail(folder.path(), "export --from-hf base --hf third --quantize int8 --group-size 16");
    says!(said, "--group-size 16 is for --quantize int4");
    let said = fail(folder.path(), "export --from-hf base --hf third --quantize int8 --calibration text.txt");
    says!(said, "--calibration is for --method gptq");
}

#[test]
fn gptq_is_nearer_to_the_model_than_rounding() {
    let folder = folder();
    // Without --max-length texts are read as `eval` reads them: as many tokens at once as the model has positions.
    let flags = "--dtype f32 --quantize int4 --group-size 16 --perplexity text.txt";
    let rtn = succeed(folder.path(), &format!("export --from-hf base --hf rtn {flags}"));
    let gptq = succeed(
        folder.path(),
        &format!("export --from-hf base --hf gptq {flags} --method gptq --calibration calibration.txt"),
    );
    says!(gptq, "28 matrices in few bits, 28 of them by GPTQ");
    let eval = succeed(folder.path(), "eval --hf gptq --perplexity text.txt");
    let of = |said: &str, what: &str| -> f64 {
        let (before, _) = said.split_once(what).unwrap_or_else(|| panic!("{what} in {said}"));
        before.trim().rsplit(' ').next().unwrap().parse().unwrap()
    };
    let [original, after] = [" before", " after"].map(|what| of(&gptq, what));
    assert_eq!(original, of(&rtn, " before"));
    assert!(eval.contains(&format!("{after:.2}")), "{after} in {eval}");

    // The error of every layer's outputs for the calibration texts.
    let base = HfFolder::open(folder.path().join("base")).unwrap();
    let text = fs::read_to_string(folder.path().join("calibration.txt")).unwrap();
    let ids: Vec<i64> = text.split_whitespace().map(|word| word[1..].parse().unwrap()).collect();
    let sequences: Vec<Vec<i64>> = ids.chunks(64).map(<[i64]>::to_vec).collect();
    let device = Device::flex();
    let sums = calibration(&base, &sequences, &device).observe(Moments::All, 0..4).unwrap();
    let [original, rtn, gptq] = ["base", "rtn", "gptq"].map(|name| weights(&folder.path().join(name)));
    assert_eq!(sums.len(), 28);
    for (layer, hessian) in &sums {
        let name = format!("{layer}.weight");
        let size = hessian.shape[0];
        let error = |rounded: &[f64]| -> f64 {
            let rows = original[&name].chunks_exact(size).zip(rounded.chunks_exact(size));
            rows.map(|(a, b)| {
                let delta: Vec<f64> = a.iter().zip(b).map(|(a, b)| a - b).collect();
                (0..size * size).map(|at| delta[at / size] * hessian.data[at] * delta[at % size]).sum::<f64>()
            })
            .sum()
        };
        let [nearest, gptq] = [&rtn, &gptq].map(|weights| error(&weights[&name]));
        assert!(gptq < 0.95 * nearest, "{layer}: GPTQ {gptq}, nearest {nearest}");
    }
}

#[test]
fn what_cannot_be_quantised_is_refused() {
    let folder = folder();
    let said = |flags: &str| fail(folder.path(), &format!("export --from-hf base --hf to {flags}"));
    says!(said("--quantize int4"), "--group-size 128 does not divide the 32 inputs of", "nearest legal: ");
    let none = said("--quantize int8 --perplexity text.txt --max-length 1");
    says!(none, "--max-length 1 is too little in layout TP1; nearest legal: 2");
    assert!(said("--quantize int8 --perplexity none.txt").contains("none.txt"));
    assert!(!folder.path().join("to").exists());
}
