//! Runs of preference tuning: they learn what they should in every layout, and refuse what they cannot use.

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use burn_megatron::config::RunConfig;
use burn_megatron::data::TokenDataset;
use burn_megatron::data::chat::{ChatTokenizer, PairDataset, PairSet, TooLong};
use burn_megatron::forward::{Input, Preference, Settings, preference};
use burn_megatron::hf::HfFolder;
use burn_megatron::preference::{PreferenceConfig, PreferenceLoss};
use burn_megatron::train::{Plan, train};
use models::WeightSource;
use serde_json::json;

use super::eval::model;
use super::preference::settings;
use super::{Line, assert_same, log, parse};

/// What assistants say is learned, with the `w4` that ends it.
const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'assistant' %}w3 w7 {% generation %}{{ m.content }} w4 \
    {% endgeneration %}{% else %}w3 w6 {{ m.content }} w4 {% endif %}{% endfor %}{% if add_generation_prompt %}w3 w7 {% endif %}";

/// A model with a chat template, and pairs of different lengths.
pub fn prepared(folder: &Path) {
    model(folder);
    fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
    let words = |seed: usize, count: usize| {
        (0..count).map(|at| format!("w{}", 10 + (seed * 37 + at * 53) % 140)).collect::<Vec<_>>().join(" ")
    };
    let row = |at: usize| json!({"prompt": words(at, 3 + at % 4), "chosen": words(at + 50, 2 + at % 5), "rejected": words(at + 90, 4 + at % 3)});
    fs::write(folder.join("pairs.jsonl"), (0..15).map(|at| row(at).to_string() + "\n").collect::<String>()).unwrap();
}

pub fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
    let text = format!(
        "[model]\nhf = {folder:?}\n[training]\nsteps = 6\nglobal-batch = 4\nseq-length = 64\ndtype = \"f64\"\nclip = \"none\"\n\
         [lr]\nmax = 2e-3\n[optimizer]\nweight-decay = 0.0\n[data]\nsplit = \"80,20,0\"\n[evaluation]\nbatches = 1\n\
         [checkpoint]\ndirectory = \"none\"\n[preference]\ntrain = [{:?}]\n[output]\ndirectory = {:?}\n",
        folder.join("pairs.jsonl"),
        folder.join(name)
    );
    parse(&text, overrides)
}

/// The log of a run.
pub fn trained(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> Vec<Line> {
    super::trained(&config(folder, name, overrides));
    log(folder, name)
}

pub const COMPARED: [&str; 6] =
    ["loss", "grad_norm", "rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy"];

#[test]
fn every_loss_learns_the_same_in_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let layouts: [&[(&str, &str)]; 7] = [
        &[("parallel.tp", "2"), ("parallel.sp", "true")],
        &[("parallel.pp", "2"), ("training.micro-batch", "2")],
        &[("parallel.cp", "2")],
        &[("parallel.dp", "2"), ("parallel.zero", "3")],
        &[("parallel.dp", "4"), ("parallel.zero", "1")],
        &[("parallel.tp", "2"), ("parallel.cp", "2"), ("recompute.granularity", "full")],
        &[("parallel.pp", "2"), ("parallel.dp", "2"), ("pipeline.schedule", "zb-h1")],
    ];
    for (index, loss) in ["dpo", "ipo", "kto", "orpo", "simpo"].into_iter().enumerate() {
        let one = trained(folder.path(), loss, &[("preference.loss", loss)]);
        let (first, last) = (&one[0], one.iter().rev().find(|line| line["kind"] == "train").unwrap());
        let number = |line: &Line, key: &str| line[key].as_f64().unwrap();
        if ["dpo", "ipo", "kto"].contains(&loss) {
            assert_eq!((number(first, "rewards_chosen"), number(first, "rewards_margin")), (0.0, 0.0), "{loss}");
        }
        match loss {
            "dpo" => assert!((number(first, "loss") - 2f64.ln()).abs() < 1e-12),
            "kto" => assert!((number(first, "loss") - 0.5).abs() < 1e-12),
            "ipo" => assert!((number(first, "loss") - 25.0).abs() < 1e-9),
            _ => {}
        }
        assert!(number(last, "loss") < number(first, "loss"), "{loss}: {one:?}");
        assert!(number(last, "rewards_margin") > number(first, "rewards_margin"), "{loss}: {one:?}");
        let valid = one.iter().find(|line| line["kind"] == "valid").unwrap();
        assert!(valid.contains_key("rewards_accuracy") && !valid.contains_key("perplexity"), "{valid:?}");
        // All layouts with one loss, two with each of the others.
        let some: Vec<_> = if index == 0 { (0..7).collect() } else { vec![index - 1, index + 2] };
        for at in some {
            let name = format!("{loss}-{at}");
            let with = [layouts[at], &[("preference.loss", loss)]].concat();
            assert_same(
                &trained(folder.path(), &name, &with),
                &one,
                &COMPARED,
                1e-10,
                &format!("{loss} {:?}", layouts[at]),
            );
        }
    }
}

/// KTO's divergence is of a whole batch, in the last evaluation too.
#[test]
fn the_last_loss_of_pairs_is_the_same_in_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let pairs = folder.path().join("pairs.jsonl").display().to_string();
    let last = |name: &str, layout: &[(&str, &str)]| {
        let own = [
            ("preference.loss", "kto"),
            ("preference.validation", pairs.as_str()),
            ("data.split", "95,5"),
            ("evaluation.final-batches", "4"),
        ];
        super::last_loss(&config(folder.path(), name, &[&own, layout].concat()))
    };
    let one = last("one", &[]);
    for (name, layout) in [
        ("four", &[("training.micro-batch", "4")][..]),
        ("ranks", &[("parallel.dp", "2"), ("parallel.cp", "2")]),
        ("stages", &[("parallel.pp", "2"), ("parallel.dp", "4"), ("training.micro-batch", "1")]),
    ] {
        let other = last(name, layout);
        assert!((other - one).abs() < 1e-10 * one, "{name}: {other} {one}");
    }
}

/// With adapters the reference is the model without them; the frozen weights are no part of the gradient.
#[test]
fn adapters_learn_preferences() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let lora = [("lora.rank", "4"), ("lr.max", "2e-2")];
    let one = trained(folder.path(), "one", &lora);
    assert!((one[0]["loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-12);
    let margin = |line: &Line| line["rewards_margin"].as_f64().unwrap();
    let last = one.iter().rev().find(|line| line["kind"] == "train").unwrap();
    assert!(margin(last) > 0.01, "{one:?}");
    let with = [&lora[..], &[("parallel.tp", "2"), ("parallel.dp", "2"), ("parallel.zero", "2")]].concat();
    assert_same(&trained(folder.path(), "two", &with), &one, &COMPARED, 1e-10, "TP2 DP2 ZeRO2");
}

/// The first step's loss and gradient are those of `forward` on the same pairs.
#[test]
fn a_step_has_the_gradient_of_forward() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let tokenizer = ChatTokenizer::open(folder.path(), None).unwrap();
    let set = PairSet {
        files: vec![folder.path().join("pairs.jsonl")],
        packing: true,
        too_long: TooLong::Refuse,
        skip_bad_rows: false,
        mismatched: false,
    };
    let (data, report) = PairDataset::open(&tokenizer, &set, 64).unwrap();
    assert_eq!(report.samples, 15);
    // One step on all sequences.
    let (count, seq) = (data.sequences(), 32);
    let (mut chosen, mut rejected) = (Vec::new(), Vec::new());
    for index in 0..count {
        let sample = data.sample(index);
        let (mask, starts) = (sample.loss_mask.unwrap(), sample.documents.unwrap());
        for (document, start) in starts.iter().enumerate() {
            let end = starts.get(document + 1).copied().unwrap_or(64);
            let end = (*start..end).rev().find(|at| mask[*at]).unwrap() + 1;
            let mut ids = sample.tokens[*start..end].to_vec();
            ids.push(sample.labels[end - 1]);
            let labels = (*start..end).map(|at| if mask[at] { sample.labels[at] } else { -100 });
            let mut labels: Vec<i64> = [-100].into_iter().chain(labels).collect();
            ids.resize(seq, 0);
            labels.resize(seq, -100);
            if document % 2 == 0 { &mut chosen } else { &mut rejected }.push((ids, labels));
        }
    }
    let all = [chosen, rejected].concat();
    let (ids, labels): (Vec<Vec<i64>>, Vec<Vec<i64>>) = all.into_iter().unzip();
    let input = Input { sequences: 30, seq, ids: ids.concat(), labels: Some(labels.concat()) };
    let folder_of_model = HfFolder::open(folder.path()).unwrap();
    let source = (folder_of_model.config(), &folder_of_model as &dyn WeightSource);
    for loss in [PreferenceLoss::Dpo, PreferenceLoss::Orpo] {
        let config = PreferenceConfig { loss, ..PreferenceConfig::default() };
        let pairs = Preference { input: input.clone(), mismatched: None, config };
        let exact = Settings { exact: true, ..settings("TP1") };
        let output = preference(source, source, &pairs, &exact).unwrap();
        let squares = output.gradients.values().flat_map(|gradient| &gradient.data).map(|value| value * value);
        let norm = squares.sum::<f64>().sqrt();
        let (sequences, word) = (count.to_string(), format!("{loss:?}").to_lowercase());
        let one = [
            ("training.steps", "1"),
            ("training.global-batch", sequences.as_str()),
            ("evaluation.batches", "0"),
            ("evaluation.final-batches", "0"),
            ("preference.loss", word.as_str()),
        ];
        let line = &trained(folder.path(), &format!("step-{word}"), &one)[0];
        let [found, grad] = ["loss", "grad_norm"].map(|key| line[key].as_f64().unwrap());
        assert!((found - output.loss).abs() < 1e-10, "{loss:?}: {found} {}", output.loss);
        assert!((grad - norm).abs() < 1e-9 * norm, "{loss:?}: {grad} {norm}");
    }
}

/// The load-balancing loss of a sequence weighs the same however many pairs are in it, and whoever computes it.
#[test]
fn sequences_of_experts_are_balanced_in_every_micro_batch() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let tokenizer = folder.path().join("tokenizer.json").display().to_string();
    let template = folder.path().join("chat_template.jinja").display().to_string();
    let run = |name: &str, overrides: &[(&str, &str)]| {
        let text = format!(
            "[model]\nfamily = \"mixtral\"\nvocab-size = 160\nhidden-size = 32\nintermediate-size = 32\n\
             num-hidden-layers = 2\nnum-attention-heads = 4\nnum-key-value-heads = 2\nhead-dim = 8\nnum-experts = 4\n\
             num-experts-per-tok = 2\nrouter-aux-loss-coef = 0.5\nrouter-balance = \"sequence\"\ninitializer-range = 0.2\n\
             [training]\nsteps = 3\nglobal-batch = 4\nseq-length = 64\ndtype = \"f64\"\nclip = \"none\"\n[lr]\nmax = 2e-3\n\
             [data]\ntokenizer = {tokenizer:?}\n[evaluation]\nbatches = 0\nfinal-batches = 0\n[checkpoint]\n\
             directory = \"none\"\n[preference]\ntrain = [{:?}]\ntemplate = {template:?}\n[output]\ndirectory = {:?}\n",
            folder.path().join("pairs.jsonl"),
            folder.path().join(name)
        );
        super::trained(&parse(&text, overrides));
        log(folder.path(), name)
    };
    let one = run("one", &[("training.micro-batch", "1")]);
    for (name, layout) in [
        ("four", &[("training.micro-batch", "4")][..]),
        ("ranks", &[("parallel.dp", "2"), ("parallel.ep", "2"), ("training.micro-batch", "2")]),
        ("stages", &[("parallel.pp", "2"), ("parallel.cp", "2"), ("training.micro-batch", "2")]),
    ] {
        assert_same(&run(name, layout), &one, &COMPARED, 1e-10, name);
    }
}

#[test]
fn pairs_and_keys_that_cannot_be_used_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let refused = |overrides: &[(&str, &str)]| {
        let overrides: Vec<(String, String)> =
            overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let text = config(folder.path(), "refused", &[]).to_toml();
        let errors = RunConfig::parse("run.toml", &text, &overrides).and_then(|config| config.check().map(|()| config));
        errors.unwrap_err().to_string()
    };
    for (overrides, words) in [
        (vec![("preference.loss", "ppo")], "preference.loss = ppo is not one of dpo, ipo, kto, orpo, simpo"),
        (vec![("preference.beta", "0")], "preference.beta = 0 is not above 0"),
        (
            vec![("preference.label-smoothing", "0.5")],
            "preference.label-smoothing = 0.5 is not at least 0 and below 0.5",
        ),
        (
            vec![("preference.gamma", "1.0")],
            "preference.gamma = 1.0 has no meaning with preference.loss = dpo; only with simpo",
        ),
        (vec![("training.loss", "per-micro-batch")], "nearest legal: per-token"),
        (vec![("chat.train", "chats.jsonl")], "only one can be the data"),
    ] {
        says!(refused(&overrides), words);
    }
    let mut rows = fs::read_to_string(folder.path().join("pairs.jsonl")).unwrap();
    rows.push_str("{\"prompt\": \"w9\", \"chosen\": \"w8\"}\n");
    fs::write(folder.path().join("pairs.jsonl"), rows).unwrap();
    let said = train(&Plan::new(&config(folder.path(), "bad", &[]), &[]).unwrap(), vec![Device::flex()], &mut |_| ());
    says!(said.unwrap_err(), "pairs.jsonl:16: rejected: missing", "preference.skip-bad-rows");
    let skipped = trained(folder.path(), "skipped", &[("preference.skip-bad-rows", "true"), ("training.steps", "1")]);
    assert_eq!(skipped[0]["kind"], "train");
}
