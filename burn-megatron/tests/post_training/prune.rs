//! `prune`: what has no effect is what goes, and distillation heals what had one.

use std::fs;
use std::path::Path;

use backend_dist::mesh::ParallelLayout;
use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::{Input, Output, Settings, forward};
use burn_megatron::hf::{Export, Format, HfFolder, export};
use burn_megatron::prune::{Kept, Pruned};
use burn_megatron::train::{Plan, train};
use models::{FamilyConfig, WeightSource};
use serde_json::Value;
use tempfile::TempDir;

use super::eval::model;
use super::{fail, gap, parse, read, succeed, write};

const IDS: usize = 600;

fn ids() -> Vec<i64> {
    (0..IDS).map(|at| ((at * at * 3 + 7 * at) % 160) as i64).collect()
}

/// A model whose tensors `change` has changed, a tokenizer, and texts.
fn folder(change: impl Fn(&str, &mut [f64], &[usize])) -> TempDir {
    let folder = TempDir::new().unwrap();
    let base = folder.path().join("base");
    fs::create_dir(&base).unwrap();
    model(&base);
    let weights = base.join("model.safetensors");
    let mut tensors = read(&weights);
    tensors.iter_mut().for_each(|(name, tensor)| change(name, &mut tensor.data, &tensor.shape));
    write(&weights, &tensors);
    let words: Vec<String> = ids().iter().map(|id| format!("w{id}")).collect();
    let text = words.chunks(30).map(|words| words.join(" ")).collect::<Vec<_>>().join("\n\n");
    fs::write(folder.path().join("text.txt"), text).unwrap();
    folder
}

fn run(config: &FamilyConfig, source: &dyn WeightSource) -> Output {
    let settings =
        Settings { exact: true, ..Settings::new([Device::flex()], ParallelLayout::default(), FloatDType::F64) };
    let ids: Vec<i64> = ids()[..128].to_vec();
    let input = Input { sequences: 2, seq: 64, labels: Some(ids.clone()), ids };
    forward(config, source, &input, &settings).unwrap()
}

fn open(folder: &Path, name: &str) -> HfFolder {
    HfFolder::open(folder.join(name)).unwrap()
}

fn outputs(folder: &Path, name: &str) -> Output {
    let folder = open(folder, name);
    run(folder.config(), &folder)
}

#[test]
fn what_has_no_effect_is_what_goes() {
    // Neurons whose gates are closed, other ones in every layer, and a key-value head without values.
    let folder = folder(|name, values, shape| {
        let columns = shape[shape.len() - 1];
        let layer = name.split('.').nth(2).and_then(|layer| layer.parse::<usize>().ok()).unwrap_or(0);
        if name.ends_with("gate_proj.weight") {
            (0..64).filter(|row| (row + layer) % 3 == 0).for_each(|row| values[row * columns..][..columns].fill(0.0));
        }
        if name.ends_with("v_proj.weight") {
            values[layer % 2 * 8 * columns..][..8 * columns].fill(0.0);
        }
    });
    let whole = outputs(folder.path(), "base");
    // 21 or 22 of 64 neurons are closed.
    let said = succeed(
        folder.path(),
        "prune --hf base --output small --intermediate 43 --heads 2 --calibration text.txt --perplexity text.txt --max-length 64",
    );
    let small = open(folder.path(), "small");
    let FamilyConfig::Llama(config) = small.config() else { panic!("{:?}", small.config()) };
    assert_eq!(
        (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim),
        (43, 2, 1, 8)
    );
    let pruned = outputs(folder.path(), "small");
    assert!(gap(&pruned.logits, &whole.logits) < 1e-12);
    let of = |what: &str| said.split_once(what).unwrap().0.trim().rsplit(' ').next().unwrap().to_string();
    assert_eq!(of(" before"), of(" after"), "{said}");
}

#[test]
fn the_layer_goes_without_which_the_loss_is_least() {
    let folder = folder(|_, _, _| ());
    let said =
        succeed(folder.path(), "prune --hf base --output small --layers 3 --calibration text.txt --max-length 64");
    let base = open(folder.path(), "base");
    let perplexity = |name: &str| -> f64 {
        let said = succeed(
            folder.path(),
            &format!("eval --hf {name} --perplexity text.txt --max-length 64 --output {name}.jsonl"),
        );
        let line: Value =
            serde_json::from_str(&fs::read_to_string(folder.path().join(format!("{name}.jsonl"))).unwrap()).unwrap();
        line["loglikelihood"].as_f64().unwrap_or_else(|| panic!("{said} {line}"))
    };
    let small = outputs(folder.path(), "small");
    let mut chosen = 0;
    for layer in 0..4 {
        let kept = Pruned::new(&base, base.config(), Kept::without_layer(base.config(), layer)).unwrap();
        let (name, tokenizer) = (format!("without{layer}"), base.tokenizer_path());
        let what = Export {
            config: kept.config(),
            companions: base.companions(),
            tokenizer: tokenizer.as_deref(),
            element: None,
            shard_bytes: u64::MAX,
            format: Format::Safetensors,
        };
        export(&folder.path().join(&name), &what, &kept).unwrap();
        if gap(&run(kept.config(), &kept).logits, &small.logits) < 1e-12 {
            let layers: Vec<String> = kept.layers().iter().map(ToString::to_string).collect();
            says!(said, &format!("kept layers: {}", layers.join(", ")));
            chosen += 1;
        }
        assert!(perplexity(&name) <= perplexity("small") + 1e-9, "{layer}");
    }
    assert_eq!(chosen, 1);
}

#[test]
fn a_pruned_model_learns_from_the_whole_one() {
    let folder = folder(|_, _, _| ());
    succeed(
        folder.path(),
        "prune --hf base --output small --layers 2 --intermediate 32 --hidden 24 --heads 2 --calibration text.txt --max-length 64",
    );
    let file = |name: &str| folder.path().join(name).display().to_string();
    let text = format!(
        "[model]\nhf = {:?}\n[training]\nsteps = 20\nglobal-batch = 4\nseq-length = 32\ndtype = \"f32\"\n[lr]\nmax = 1e-2\n\
         [data]\ntext = [{:?}]\ntokenizer = {:?}\neod-id = 2\nsplit = \"80,20,0\"\n[evaluation]\nbatches = 1\n[checkpoint]\ndirectory = \"none\"\n\
         [distill]\nteacher = {:?}\nweight = 1.0\n[output]\ndirectory = {:?}\n",
        file("small"),
        file("text.txt"),
        file("base/tokenizer.json"),
        file("base"),
        file("run")
    );
    train(&Plan::new(&parse(&text, &[]), &[]).unwrap(), vec![Device::flex()], &mut |_| ()).unwrap();
    let lines = fs::read_to_string(folder.path().join("run/steps.jsonl")).unwrap();
    let losses: Vec<f64> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .filter(|line| line["kind"] == "train")
        .map(|line| line["loss"].as_f64().unwrap())
        .collect();
    assert!(losses.len() == 20 && losses[19] < 0.7 * losses[0], "{losses:?}");
}

#[test]
fn what_cannot_be_pruned_is_refused() {
    let folder = folder(|_, _, _| ());
    let said = |flags: &str| fail(folder.path(), &format!("prune --hf base --output to {flags}"));
    assert!(said("--calibration text.txt").contains("give --layers, --intermediate, --hidden or --heads"));
    assert!(said("--layers 2").contains("--calibration is needed"));
    let heads = said("--heads 3 --calibration text.txt");
    says!(heads, "--heads 3 of the model's 4, of which 2 share a key-value head; nearest legal: 4");
    assert!(!folder.path().join("to").exists());
    // Before any text is read.
    let full = fail(folder.path(), "prune --hf base --output base --layers 2 --calibration none.txt");
    says!(full, "base: is not empty");
}
