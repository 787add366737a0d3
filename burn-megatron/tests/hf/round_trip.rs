//! A model that is imported and exported again is the model that it was.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn_megatron::checkpoint::{Checkpoint, Kind, RunState, SavedTensor, Saver, SaverOptions, Slice};
use burn_megatron::hf::HfFolder;
use safetensors::Dtype;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::files::{MODELS, Tensors, changed, golden, read};

pub fn command(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_burn-megatron")).args(words).output().unwrap()
}

pub fn succeed(words: &[&str]) -> String {
    let output = command(words);
    assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn fail(words: &[&str]) -> String {
    let output = command(words);
    assert!(!output.status.success(), "{words:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const TOKENIZER: &str = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
    "pre_tokenizer": null, "post_processor": null, "decoder": null,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "tokenizer": 1}, "unk_token": "a"}}"#;

/// A folder in a temporary one, and a checkpoint of `from` in another.
struct Paths {
    root: TempDir,
}

impl Paths {
    fn importing(from: &Path) -> Self {
        let root = tempfile::tempdir().unwrap();
        succeed(&["import", "--hf", text(from), "--output", text(&root.path().join("checkpoint"))]);
        Self { root }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn export(&self, to: &str, options: &[&str]) -> PathBuf {
        let (to, from) = (self.at(to), self.at("checkpoint"));
        succeed(&[&["export", "--hf", text(&to), "--checkpoint", text(&from)], options].concat());
        to
    }
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

fn weights(folder: &Path) -> Tensors {
    read(&folder.join("model.safetensors"))
}

#[test]
fn every_model_comes_back_as_it_was() {
    for model in MODELS.split(' ') {
        let from = changed(model, |_| {});
        fs::write(from.path().join("tokenizer.json"), TOKENIZER).unwrap();
        fs::write(from.path().join("special_tokens_map.json"), b"{ }").unwrap();
        let paths = Paths::importing(from.path());
        let to = paths.export("out", &[]);
        assert_eq!(weights(&to), weights(from.path()), "{model}");
        assert_eq!(json_of(&to.join("config.json")), json_of(&golden(model).join("config.json")), "{model}");
        for file in ["generation_config.json", "tokenizer.json", "special_tokens_map.json"] {
            assert_eq!(fs::read(to.join(file)).unwrap(), fs::read(from.path().join(file)).unwrap(), "{model}: {file}");
        }
        assert_eq!(fs::read_dir(&to).unwrap().count(), 5, "{model}");
    }
}

/// A model with one tensor in bf16.
fn half() -> TempDir {
    changed("gpt2", |tensors| {
        let half = tensors.get_mut("transformer.wte.weight").unwrap();
        half.data = half.values().iter().flat_map(|value| half::bf16::from_f64(*value).to_le_bytes()).collect();
        half.dtype = Dtype::BF16;
    })
}

/// Types are those of the source, tensor by tensor, unless another one is asked for.
#[test]
fn types_stay_or_are_converted() {
    let from = half();
    let paths = Paths::importing(from.path());
    assert_eq!(weights(&paths.export("same", &[])), weights(from.path()));
    let converted = paths.export("bf16", &["--dtype", "bf16"]);
    assert_eq!(json_of(&converted.join("config.json"))["dtype"], json!("bfloat16"));
    for (name, stored) in weights(&converted) {
        assert_eq!(stored.dtype, Dtype::BF16, "{name}");
        let expected = weights(from.path())[&name].values();
        assert!(stored.values().iter().zip(&expected).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0), "{name}");
    }
    let wider = paths.export("f64", &["--dtype", "f64"]);
    assert!(weights(&wider).iter().all(|(name, stored)| stored.values() == weights(from.path())[name].values()));
    says!(fail(&["export", "--hf", "x", "--checkpoint", "y", "--dtype", "int8"]), "legal: f64, f32, bf16, f16");
}

#[test]
fn large_models_are_written_in_shards() {
    let paths = Paths::importing(&golden("llama3"));
    let folder = paths.export("out", &["--max-shard-size", "100KB"]);
    let index = json_of(&folder.join("model.safetensors.index.json"));
    let expected = weights(&golden("llama3"));
    let total: usize = expected.values().map(|stored| stored.data.len()).sum();
    assert_eq!(index["metadata"]["total_size"], json!(total));
    let files: std::collections::BTreeSet<&str> =
        index["weight_map"].as_object().unwrap().values().map(|file| file.as_str().unwrap()).collect();
    assert_eq!(files.first(), Some(&"model-00001-of-00003.safetensors"));
    assert_eq!(files.len(), 3);
    let mut found = Tensors::new();
    for file in files {
        let shard = read(&folder.join(file));
        assert!(shard.values().map(|stored| stored.data.len()).sum::<usize>() <= 100_000);
        assert!(shard.keys().all(|name| index["weight_map"][name] == file));
        found.extend(shard);
    }
    assert_eq!(found, expected);
    HfFolder::open(&folder).unwrap();
    assert!(fail(&["export", "--hf", "x", "--checkpoint", "y", "--max-shard-size", "5"]).contains("y"));
}

#[test]
fn nothing_is_written_over() {
    let paths = Paths::importing(&golden("llama2"));
    let (out, checkpoint) = (paths.export("out", &[]), paths.at("checkpoint"));
    let message = fail(&["export", "--hf", text(&out), "--checkpoint", text(&checkpoint)]);
    says!(message, "is not empty; give a folder that does not exist yet");
    says!(fail(&["import", "--hf", text(&golden("gpt2")), "--output", text(&checkpoint)]), "holds checkpoints already");
    assert_eq!(fs::read_dir(paths.root.path()).unwrap().count(), 2, "nothing is left over");
}

/// A tokenizer in a form that is not read does not keep the weights from being used.
#[test]
fn a_tokenizer_that_is_not_read_is_left_out_and_said() {
    let folder = changed("llama3", |_| {});
    let (hf, root) = (folder.path(), tempfile::tempdir().unwrap());
    fs::write(hf.join("tokenizer.model"), "hello").unwrap();
    let (checkpoint, out) = (root.path().join("checkpoint"), root.path().join("out"));
    let left_out = |words: &[&str]| {
        let output = command(words);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{words:?}: {errors}");
        says!(errors, "the tokenizer is left out: ", "tokenizer.model: this is no");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    says!(left_out(&["import", "--hf", text(hf), "--output", text(&checkpoint)]), " without a tokenizer");
    left_out(&["export", "--checkpoint", text(&checkpoint), "--like", text(hf), "--hf", text(&out)]);
    assert!(!out.join("tokenizer.json").exists());
    succeed(&["generate", "--hf", text(hf), "--tokens", "1,2", "--max-new-tokens", "2"]);
    says!(fail(&["generate", "--hf", text(hf), "--prompt", "a"]), "tokenizer.model: this is no tokenizer");
    // A `tokenizer.json` is what it says, or the folder is damaged.
    fs::write(hf.join("tokenizer.json"), "{}").unwrap();
    let message = fail(&["import", "--hf", text(hf), "--output", text(&root.path().join("other"))]);
    says!(message, "tokenizer.json: is no tokenizer");
}

/// A whole tensor of a checkpoint.
pub fn slice(of: &Checkpoint, tensor: &SavedTensor) -> Slice {
    let shape = tensor.global_shape.clone();
    let ranges: Vec<_> = shape.iter().map(|size| 0..*size).collect();
    let (dtype, data) = of.read(tensor.kind, &tensor.name, &shape, &ranges).unwrap();
    Slice { kind: tensor.kind, name: tensor.name.clone(), global_shape: shape, ranges, dtype, data: data.into() }
}

pub fn save(to: &Path, slices: Vec<Slice>, state: &RunState) {
    let saver = Saver::new(to, 1, SaverOptions::default()).unwrap();
    saver.submit(0, slices, state).unwrap();
    saver.wait().unwrap();
}

/// Routers' biases stay in fp32 where other weights are in bf16.
#[test]
fn an_average_has_the_type_of_each_weight() {
    let from = half();
    let paths = Paths::importing(from.path());
    let imported = Checkpoint::open(paths.at("checkpoint")).unwrap();
    let exact = 1.0 + f32::EPSILON;
    let average = |of: &Slice| {
        let count = of.global_shape.iter().product();
        let data: Vec<u8> = std::iter::repeat_n(exact.to_le_bytes(), count).flatten().collect();
        Slice { kind: Kind::Average, dtype: Dtype::F32, data: data.into(), ..of.clone() }
    };
    let weights: Vec<Slice> = imported.tensors().iter().map(|tensor| slice(&imported, tensor)).collect();
    let averages: Vec<Slice> = weights.iter().map(average).collect();
    let state = RunState { step: 1, ..imported.state().clone() };
    save(&paths.at("checkpoint"), [weights, averages].concat(), &state);
    for (to, flags, of_half) in
        [("own", &["--ema"][..], (Dtype::BF16, 1.0)), ("f32", &["--ema", "--dtype", "f32"], (Dtype::F32, exact))]
    {
        for (name, stored) in self::weights(&paths.export(to, flags)) {
            let expected = if name == "transformer.wte.weight" { of_half } else { (Dtype::F32, exact) };
            assert_eq!((stored.dtype, stored.values()[0]), (expected.0, expected.1.into()), "{to}: {name}");
        }
    }
}

/// What another program than `import` has saved has no files of Hugging Face's; `--like` gives them.
#[test]
fn a_checkpoint_without_files_takes_those_of_a_folder() {
    let paths = Paths::importing(&golden("mistral"));
    let imported = Checkpoint::open(paths.at("checkpoint")).unwrap();
    let state = RunState { config: Value::Null, step: 7, ..imported.state().clone() };
    save(&paths.at("checkpoint"), imported.tensors().iter().map(|tensor| slice(&imported, tensor)).collect(), &state);

    let made_up = json_of(&paths.export("alone", &[]).join("config.json"));
    assert_eq!((&made_up["sliding_window"], &made_up["dtype"]), (&json!(16), &json!("float32")));
    HfFolder::open(paths.at("alone")).unwrap();
    assert!(!paths.at("alone").join("generation_config.json").exists());

    let like = paths.export("like", &["--like", text(&golden("mistral"))]);
    assert_eq!(json_of(&like.join("config.json")), json_of(&golden("mistral").join("config.json")));
    assert!(like.join("generation_config.json").exists());
}

/// Whoever opens the checkpoint finds the weights under our names, as they were.
#[test]
fn an_imported_checkpoint_is_a_checkpoint() {
    let paths = Paths::importing(&golden("qwen3"));
    let checkpoint = Checkpoint::open(paths.at("checkpoint")).unwrap();
    assert_eq!((checkpoint.state().step, checkpoint.tensors().len()), (0, 47));
    let (dtype, bytes) = checkpoint.read(Kind::Weight, "layers.2.attention.k_norm.weight", &[8], &[2..5]).unwrap();
    let expected = &weights(&golden("qwen3"))["model.layers.2.self_attn.k_norm.weight"];
    assert_eq!((dtype, bytes.as_slice()), (Dtype::F32, &expected.data[8..20]));
}

#[test]
fn forward_from_the_command_line() {
    let root = tempfile::tempdir().unwrap();
    let (input, output) = (golden("qwen3").join("oracle.safetensors"), root.path().join("out.safetensors"));
    let folder = golden("qwen3");
    let words = ["forward", "--hf", text(&folder), "--input", text(&input), "--output"];
    let flags = ["--grads", "--dtype", "f64", "--tensor-parallel", "2", "--sequence-parallel"];
    let said = succeed(&[&words[..], &[text(&output)], &flags].concat());
    assert!(said.starts_with("2 x 40 tokens in TP2 SP, F64: logits, loss 5.713082790, 47 gradients in "), "{said}");
    let written = read(&output);
    assert_eq!((written["logits"].shape.as_slice(), written["logits"].dtype), ([2, 40, 256].as_slice(), Dtype::F64));
    assert_eq!(written["loss"].values(), read(&input)["loss"].values());
    assert_eq!(written["grad.model.layers.0.self_attn.q_norm.weight"].shape, [8]);

    let message = fail(&[&words[..], &[text(&output), "--pipeline-parallel", "2"]].concat());
    says!(message, "pipeline-parallel 2 is for training only; nearest legal: 1");
    let weights = golden("qwen3").join("model.safetensors");
    let message = fail(&["forward", "--hf", words[2], "--input", text(&weights), "--output", text(&output)]);
    says!(message, "tensor `input_ids` is missing");
    says!(fail(&[&words[..], &["/dev/null"]].concat()), "not a regular file");

    // A disk that has room for 4,096 bytes more: the last output stays.
    let (before, limited) = (fs::read(&output).unwrap(), "trap '' XFSZ; ulimit -f 8; exec \"$0\" \"$@\"");
    let mut shell = Command::new("sh");
    shell.args(["-c", limited, env!("CARGO_BIN_EXE_burn-megatron")]).args(words).arg(&output);
    assert!(!shell.output().unwrap().status.success());
    assert_eq!(fs::read(&output).unwrap(), before);
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1);
}

/// transformers would end texts at token 2 of a Llama that says nothing else.
#[test]
fn what_ends_the_texts_of_a_new_model_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("book.txt"), "One fox.\n\nTwo foxes, and a third one.\n\n".repeat(40)).unwrap();
    let flags = "--model.preset tiny --training.steps 1 --training.seq-length 16 --training.global-batch 2 --evaluation.batches 1";
    for tokenizer in ["char", "bpe"] {
        let (run, to) = (at(tokenizer), at(&format!("{tokenizer}-hf")));
        let book = at("book.txt");
        let of_run = ["--data.text", text(&book), "--data.tokenizer", tokenizer, "--output.directory", text(&run)];
        succeed(&[&["train"][..], &of_run, &flags.split(' ').collect::<Vec<_>>()].concat());
        succeed(&["export", "--checkpoint", text(&run.join("checkpoints")), "--hf", text(&to)]);
        let end = json_of(&to.join("tokenizer.json"))["added_tokens"].as_array().unwrap().first().cloned().unwrap();
        assert_eq!(end["content"], json!("<|endoftext|>"), "{tokenizer}");
        let generation = json_of(&to.join("generation_config.json"));
        assert_eq!(generation, json!({ "bos_token_id": null, "eos_token_id": end["id"] }), "{tokenizer}");
        assert_eq!(json_of(&to.join("tokenizer_config.json"))["eos_token"], end["content"], "{tokenizer}");
        let read = HfFolder::open(&to).unwrap();
        assert_eq!(json!(read.generation().eos_token_id), json!([end["id"]]), "{tokenizer}");
    }
}
