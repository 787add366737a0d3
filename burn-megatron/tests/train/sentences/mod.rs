//! `train` of BERT and T5 from a file: the same losses in every layout, a run that resumes, an export that is read again, and
//! what is refused.

mod adapters;
mod text;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::FloatDType;
use burn_megatron::data::indexed::{Dtype, IndexedWriter};
use burn_megatron::forward::{Settings, forward_module};
use burn_megatron::hf::ModuleFolder;
use burn_megatron::prelude::*;
use models::hf::HostInput;
use serde_json::{Value, json};

use crate::command::{fail, succeed};
use crate::runs::{DP, PP, SP, TP, ZERO, export, layouts_agree, logged, refused, resumes, trained};

const WORDS: usize = 40;

/// A tokenizer of special tokens and words, and documents of sentences in which a word tells the next one.
fn data(folder: &Path, special: &[&str]) {
    let words = (0..WORDS).map(|word| format!("word{word}"));
    let names: Vec<String> = special.iter().map(|name| name.to_string()).chain(words).collect();
    let vocab: serde_json::Map<String, Value> =
        names.iter().enumerate().map(|(id, name)| (name.clone(), id.into())).collect();
    let tokenizer = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": null, "decoder": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": names[special.len()]}});
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let mut writer = IndexedWriter::create(folder.join("lines"), Dtype::U16).unwrap();
    for document in 0..24 {
        for sentence in 0..5 {
            let first = document * 7 + sentence * 3;
            let length = 5 + (document + sentence) % 6;
            let words = (0..length).map(|at| (special.len() + (first + at) % WORDS) as i64);
            writer.push_sequence(&words.collect::<Vec<_>>()).unwrap();
        }
        writer.end_document();
    }
    writer.finish().unwrap();
}

const BERT: &str = "preset = \"bert-base\"\nvocab-size = 48\nhidden-size = 16\nnum-hidden-layers = 2\n\
    num-attention-heads = 4\nintermediate-size = 32\nmax-position-embeddings = 32\n";
const T5: &str = "preset = \"t5-small\"\nvocab-size = 56\nd-model = 16\nd-kv = 4\nd-ff = 24\nnum-heads = 4\n\
    num-layers = 2\nnum-decoder-layers = 2\n";

/// A folder with the data and the file of a run.
fn run_of(model: &str, dropout: f64) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (sizes, more) = match model {
        "bert" => {
            data(folder.path(), &["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]);
            (format!("{BERT}hidden-dropout-prob = {dropout}\nattention-probs-dropout-prob = {dropout}\n"), "")
        }
        _ => {
            let sentinels: Vec<String> = (0..10).map(|number| format!("<extra_id_{number}>")).collect();
            let special = ["<pad>", "</s>", "<unk>"].into_iter().chain(sentinels.iter().map(String::as_str));
            data(folder.path(), &special.collect::<Vec<_>>());
            (format!("{T5}dropout-rate = {dropout}\n"), "decoder-seq-length = 20\nvocab-extra-ids = 10\n")
        }
    };
    let at = folder.path().display();
    let text = format!(
        "[model]\n{sizes}[training]\nsteps = 6\nmicro-batch = 2\nglobal-batch = 8\nseq-length = 32\ndtype = \"f64\"\n\
         [lr]\nmax = 0.01\nwarmup = \"2 steps\"\n[optimizer]\nweight-decay = 0.1\n[evaluation]\nevery = 2\nbatches = 1\n\
         [data]\nprefixes = [\"{at}/lines\"]\ntokenizer = \"{at}/tokenizer.json\"\nsplit = \"8,4,0\"\n\
         [masked]\n{more}[output]\ndirectory = \"{at}/run\"\n[checkpoint]\nkeep-last = \"none\"\n"
    );
    fs::write(folder.path().join("run.toml"), text).unwrap();
    folder
}

/// The losses of all steps, and of all evaluations.
fn losses(run: &Path) -> [Vec<f64>; 2] {
    logged(run, "loss")
}

fn learns_the_same(model: &str) {
    let folder = run_of(model, 0.0);
    let layouts = [&[TP, "2", SP, "true", DP, "2", ZERO, "1"][..], &[PP, "2", DP, "2"], &[DP, "4", ZERO, "3"]];
    let [alone, held_out] = layouts_agree(folder.path(), &[], &["loss"], &layouts);
    assert_eq!((alone.len(), held_out.len()), (6, 3));
    assert!(alone[5] < alone[0], "{alone:?}");
}

#[test]
fn bert_learns_the_same_in_every_layout() {
    learns_the_same("bert");
}

#[test]
fn t5_learns_the_same_in_every_layout() {
    learns_the_same("t5");
}

/// With dropout.
fn repeats(model: &str, flags: &[&str]) {
    let folder = run_of(model, 0.1);
    resumes(folder.path(), flags, || {
        let message = refused(folder.path(), &[flags, &["--masked.mask-prob", "0.2"]].concat());
        assert!(message.contains("masked.mask-prob = 0.2, but the run that would be resumed has 0.15"), "{message}");
    });
    let run = folder.path().join("run");
    let whole = losses(&run);
    for (key, value, was) in [("training.steps", "8", "6"), ("training.clip", "none", "1.0")] {
        let message = refused(folder.path(), &[flags, &[&format!("--{key}"), value]].concat());
        assert!(
            message.contains(&format!("{key} = {value}, but the run that would be resumed has {was};")),
            "{message}"
        );
    }
    // The checkpoints of a run that is given up would be taken for those of the new one.
    let message = refused(folder.path(), &[flags, &["--checkpoint.resume", "never"]].concat());
    assert!(message.contains("checkpoint.resume = never, but ") && message.contains("holds checkpoints"), "{message}");
    // There is nothing left to do.
    assert!(trained(folder.path(), flags).contains("began after step 6 of 6"));
    assert_eq!(losses(&run), whole);
}

#[test]
fn bert_resumes_bit_for_bit() {
    repeats("bert", &[]);
}

#[test]
fn t5_resumes_bit_for_bit() {
    repeats("t5", &[TP, "2", DP, "2", ZERO, "1"]);
}

#[test]
fn what_is_exported_is_read_and_a_folder_is_where_a_run_begins() {
    let folder = run_of("t5", 0.0);
    let (run, hf) = (folder.path().join("run"), folder.path().join("hf"));
    trained(folder.path(), &["--training.dtype", "bf16"]);
    let [mixed, _] = losses(&run);
    export(&run, &hf);
    let ints = |shape: [usize; 2], first: i64| HostInput::Ints {
        shape: shape.into(),
        data: (0..(shape[0] * shape[1]) as i64).map(|at| first + at % 20).collect(),
    };
    let inputs =
        BTreeMap::from([("input_ids".to_string(), ints([2, 9], 13)), ("labels".to_string(), ints([2, 4], 14))]);
    let settings = Settings::new(vec![burn::tensor::Device::flex()], ParallelLayout::default(), FloatDType::F64);
    let outputs = forward_module(&ModuleFolder::open(&hf).unwrap(), &inputs, &settings).unwrap();
    assert!(outputs.loss.is_some_and(f64::is_finite));
    // The tokenizer came with it.
    succeed(folder.path(), "generate --prompt word3 --max-tokens 2 --hf hf");

    let from = |more: &[&str]| {
        let run = folder.path().join("from_folder");
        let flags = [
            "--model.preset",
            "none",
            "--model.hf",
            hf.to_str().unwrap(),
            "--training.steps",
            "2",
            "--lr.warmup",
            "0 steps",
        ];
        trained(folder.path(), &[&flags[..], &["--output.directory", run.to_str().unwrap()], more].concat());
        losses(&run)[0].clone()
    };
    let found = from(&[]);
    // Its first step is one more step of the run, and not one of random weights.
    assert!(found[0] < mixed[0] - 0.05, "{found:?} after {mixed:?}");
}

/// What a disk refuses ends a run in words, as one that failed: a run that was stopped has another code.
#[test]
fn a_full_disk_is_named() {
    let folder = run_of("bert", 0.0);
    says!(
        fail(folder.path(), "train run.toml --log.jsonl /dev/full --output.directory other"),
        "training failed: the log cannot be written: /dev/full: No space left on device"
    );
    let said = fail(folder.path(), "train run.toml --log.mlflow run.toml --output.directory other");
    says!(said, "error: [log]: run.toml");
    assert_eq!(said.matches("choose another folder").count(), 1, "{said}");
    // Nothing can be written in the place of a folder with something in it.
    fs::create_dir_all(folder.path().join("run/checkpoints/model-1.bpk/full")).unwrap();
    says!(fail(folder.path(), "train run.toml"), "training failed: Checkpoint error", "model-1.bpk");
    says!(
        fail(folder.path(), "generate --checkpoint run/checkpoints --prompt word3"),
        "export --checkpoint run/checkpoints"
    );
}

#[test]
fn a_run_needs_no_evaluations_and_no_checkpoints() {
    let folder = run_of("bert", 0.0);
    let run = folder.path().join("run");
    let said = trained(folder.path(), &["--evaluation.batches", "0", "--checkpoint.directory", "none"]);
    assert!(!said.contains("held-out") && !run.join("checkpoints").exists(), "{said}");
    let [losses, held_out] = losses(&run);
    assert_eq!((losses.len(), held_out.len()), (6, 0));
    // What the file resolves to is such a file.
    let printed = trained(folder.path(), &["--print-config"]);
    fs::write(folder.path().join("run.toml"), &printed).unwrap();
    assert_eq!(trained(folder.path(), &["--print-config"]), printed);
}

#[test]
fn keys_without_a_meaning_are_refused_before_anything_runs() {
    let folder = run_of("bert", 0.0);
    let t5 = run_of("t5", 0.0);
    let bert = folder.path();
    let headless = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/golden/hf/bert_model");
    for (folder, flags, words) in [
        (bert, &["--fp8.format", "hybrid"][..], "fp8.format = hybrid has no meaning with bert"),
        (
            bert,
            &["--model.preset", "none", "--model.hf", headless],
            "model.hf: a BertModel has no head that predicts masked tokens; nearest legal: a folder of BertForMaskedLM",
        ),
        (bert, &["--parallel.context-parallel", "2"], "parallel.context-parallel = 2 has no meaning with bert"),
        (bert, &["--training.ema-decay", "0.9"], "training.ema-decay = 0.9 has no meaning with bert"),
        (bert, &["--data.text", "book.txt"], "data.text = [\"book.txt\"] has no meaning with bert"),
        (bert, &["--training.dtype", "f16"], "training.dtype = f16 is not for bert; legal: f32, f64, bf16"),
        (bert, &["--training.loss", "per-token"], "training.loss = per-token is not for bert; legal: per-micro-batch"),
        (bert, &["--optimizer.kind", "sgd"], "optimizer.kind = sgd is not for bert; legal: adamw"),
        (
            bert,
            &["--training.global-batch", "9"],
            "training.global-batch = 9 is no multiple of micro-batch x data-parallel = 2; nearest legal: 8, 10",
        ),
        (
            bert,
            &["--checkpoint.every", "3"],
            "checkpoint.every = 3: a checkpoint follows an evaluation, evaluation.every = 2; nearest legal: 2",
        ),
        (bert, &["--data.tokenizer", "bpe"], "data.tokenizer = bpe: bert needs the file of the tokenizer"),
        (
            bert,
            &["--training.seq-length", "64"],
            "training.seq-length = 64: the model has 32 positions; nearest legal: 32",
        ),
        (bert, &["--model.vocab-size", "44"], "nearest legal: model.vocab-size = 45"),
        (bert, &["--inject", "nan@3"], "--inject has no meaning with bert"),
        (
            bert,
            &["--pipeline.schedule", "gpipe"],
            "pipeline.schedule = gpipe with pipeline-parallel 1; nearest legal: none",
        ),
        (t5.path(), &["--masked.vocab-extra-ids", "12"], "the tokenizer has no <extra_id_10>; nearest legal: 10"),
        (t5.path(), &["--masked.mask-prob", "2"], "masked.mask-prob = 2; nearest legal: above 0"),
        (
            bert,
            &["--model.preset", "tiny", "--masked.mask-prob", "0.3"],
            "masked.mask-prob = 0.3 has no meaning with this model",
        ),
    ] {
        let message = refused(folder, flags);
        assert!(message.contains(words), "{flags:?}: {message}");
    }
    let unknown = PathBuf::from(bert).join("run.toml");
    let text = fs::read_to_string(&unknown).unwrap().replace("hidden-size", "hiden-size");
    fs::write(&unknown, text).unwrap();
    let message = refused(bert, &[]);
    assert!(
        message.contains("unknown key `model.hiden-size` for family bert; did you mean `model.hidden-size`?"),
        "{message}"
    );
}
