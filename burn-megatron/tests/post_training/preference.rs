//! Preference tuning: log-probabilities, loss and gradients of DPO are those of transformers and trl's formula, those of the
//! other losses follow from the same sums, and runs learn what they should in every layout.

use std::fs;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use burn_megatron::config::RunConfig;
use burn_megatron::data::TokenDataset;
use burn_megatron::data::chat::{ChatTokenizer, PairDataset, PairSet, TooLong};
use burn_megatron::forward::{Input, Preference, Settings, forward, preference, read_preference};
use burn_megatron::hf::{HfFolder, read_adapter};
use burn_megatron::preference::{PreferenceConfig, PreferenceLoss};
use burn_megatron::train::{Plan, train};
use models::WeightSource;
use serde_json::json;

use super::eval::model;
use super::{Line, assert_same, fail, gap, golden, log, parse, read, succeed};

fn settings(layout: &str) -> Settings {
    Settings { gradients: true, ..Settings::new([Device::flex()], layout.parse().unwrap(), FloatDType::F64) }
}

#[test]
fn loss_and_gradients_are_those_of_the_oracle_in_every_layout() {
    let path = golden("dpo/oracle.safetensors");
    let (pairs, oracle) = (read_preference(&path, PreferenceLoss::Dpo).unwrap(), read(&path));
    let [policy, reference] = ["lora/base", "dpo/reference"].map(|name| HfFolder::open(golden(name)).unwrap());
    for layout in ["TP1", "TP2 SP", "CP2", "DP2", "TP2 DP3"] {
        let models = [&policy, &reference].map(|folder| (folder.config(), folder as &dyn models::WeightSource));
        let output = preference(models[0], models[1], &pairs, &settings(layout)).unwrap();
        for (name, found) in
            [("policy_logps", &output.policy), ("reference_logps", &output.reference), ("loss", &vec![output.loss])]
        {
            let gap = gap(found, &oracle[name].data);
            assert!(gap < 1e-9, "{layout}: {name} {gap:e}");
        }
        let names: Vec<&str> = oracle.keys().filter_map(|name| name.strip_prefix("grad.")).collect();
        assert_eq!(output.gradients.len(), names.len());
        for name in names {
            let gap = gap(&output.gradients[name].data, &oracle[&format!("grad.{name}")].data);
            assert!(gap < 1e-6, "{layout}: {name} {gap:e}");
        }
    }
}

/// With an adapter the reference may be the model without it.
#[test]
fn the_reference_of_an_adapter_is_its_base() {
    let pairs = read_preference(&golden("dpo/oracle.safetensors"), PreferenceLoss::Dpo).unwrap();
    let base = HfFolder::open(golden("lora/base")).unwrap();
    let adapter = read_adapter(&golden("lora/lora_all/adapter"), base.config()).unwrap();
    let model = (base.config(), &base as &dyn models::WeightSource);
    let with = Settings { adapter: Some(adapter), exact: true, ..settings("TP2") };
    let output = preference(model, model, &pairs, &with).unwrap();
    let plain = preference(model, model, &pairs, &Settings { exact: true, ..settings("TP1") }).unwrap();
    assert!((plain.loss - 2f64.ln()).abs() < 1e-12, "a policy that is its reference prefers nothing: {}", plain.loss);
    assert!(gap(&output.reference, &plain.policy) < 1e-12 && gap(&output.policy, &plain.policy) > 1e-3);
    assert!(output.gradients.keys().all(|name| name.contains("lora_")) && output.gradients.len() == 2 * 7 * 4);
    // A derivative, from the loss of a model that is a little further: B, which moves the policy only.
    let (name, step) = ("layers.1.mlp.down_proj.lora_B.weight", 1e-5);
    let mut moved = with.clone();
    moved.gradients = false;
    moved.adapter.as_mut().unwrap().tensors.get_mut(name).unwrap().data[5] += step;
    let quotient = (preference(model, model, &pairs, &moved).unwrap().loss - output.loss) / step;
    let gradient = output.gradients["model.layers.1.mlp.down_proj.lora_B.weight"].data[5];
    assert!((quotient - gradient).abs() < 1e-4 * gradient.abs().max(1e-2), "{quotient} {gradient}");
    assert!(forward(base.config(), &base, &pairs.input, &settings("TP1")).is_ok());
}

#[test]
fn the_command_writes_the_oracles_tensors_and_refuses_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let [policy, reference, input] =
        ["lora/base", "dpo/reference", "dpo/oracle.safetensors"].map(|name| golden(name).display().to_string());
    let command =
        format!("forward --objective dpo --hf {policy} --input {input} --output out.safetensors --grads --dtype f64");
    let said = succeed(folder.path(), &format!("{command} --reference {reference} --tensor-parallel 2"));
    says!(said, "3 pairs", "loss 0.721238691");
    let (found, oracle) = (read(&folder.path().join("out.safetensors")), read(&golden("dpo/oracle.safetensors")));
    for name in oracle.keys().filter(|name| *name != "beta") {
        assert!(gap(&found[name].data, &oracle[name].data) < 1e-6, "{name}");
    }
    assert!(fail(folder.path(), &command).contains("--objective dpo needs --reference, or --adapter"));
    let other = golden("lora/lora_all/oracle.safetensors").display().to_string();
    let said = fail(
        folder.path(),
        &format!("forward --objective dpo --hf {policy} --reference {reference} --input {other} --output o"),
    );
    says!(said, "tensor `completion_mask` is missing");
}

/// The losses by the papers' formulas from log-probabilities, and gradients as differences of losses.
#[test]
fn other_losses_follow_from_the_same_sums_in_every_layout() {
    let path = golden("dpo/oracle.safetensors");
    let [policy, reference] = ["lora/base", "dpo/reference"].map(|name| HfFolder::open(golden(name)).unwrap());
    let models = [&policy, &reference].map(|folder| (folder.config(), folder as &dyn WeightSource));
    let oracle = read(&path);
    let [p, r] = ["policy_logps", "reference_logps"].map(|name| oracle[name].data.clone());
    let beta = oracle["beta"].data[0];
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    for loss in [PreferenceLoss::Ipo, PreferenceLoss::Kto, PreferenceLoss::Orpo, PreferenceLoss::Simpo] {
        let pairs = read_preference(&path, loss).unwrap();
        let labels = pairs.input.labels.clone().unwrap();
        let n: Vec<f64> = labels
            .chunks(pairs.input.seq)
            .map(|labels| labels[1..].iter().filter(|label| **label >= 0).count() as f64)
            .collect();
        let of_pair = |w: usize| {
            let l = w + 3;
            let odds = |at: usize| (p[at] / n[at]).exp() / (1.0 - (p[at] / n[at]).exp());
            match loss {
                PreferenceLoss::Ipo => ((p[w] - r[w]) / n[w] - (p[l] - r[l]) / n[l] - 0.5 / beta).powi(2),
                PreferenceLoss::Kto => {
                    (1.0 - sigmoid(beta * (p[w] - r[w]))) / 2.0 + (1.0 - sigmoid(-beta * (p[l] - r[l]))) / 2.0
                }
                PreferenceLoss::Orpo => -p[w] / n[w] - beta * sigmoid((odds(w) / odds(l)).ln()).ln(),
                _ => -sigmoid(beta * (p[w] / n[w] - p[l] / n[l]) - 0.5).ln(),
            }
        };
        let expected = (0..3).map(of_pair).sum::<f64>() / 3.0;
        for layout in ["TP1", "TP2 SP", "CP2", "DP2"] {
            let output = preference(models[0], models[1], &pairs, &settings(layout)).unwrap();
            assert!((output.loss - expected).abs() < 1e-9, "{loss:?} {layout}: {} {expected}", output.loss);
            if layout == "TP1" {
                assert_slope(&policy, &reference, &pairs, &output.gradients["model.norm.weight"].data, loss);
            }
        }
    }
    // Answers to other prompts move KTO's loss.
    let mut pairs = read_preference(&path, PreferenceLoss::Kto).unwrap();
    let plain = preference(models[0], models[1], &pairs, &settings("TP1")).unwrap().loss;
    pairs.mismatched = Some(pairs.input.clone());
    let kl = p.iter().zip(&r).map(|(p, r)| p - r).sum::<f64>() / 6.0;
    let with = preference(models[0], models[1], &pairs, &settings("TP1")).unwrap().loss;
    let z = kl.max(0.0);
    let expected = (0..3)
        .map(|w| (2.0 - sigmoid(beta * (p[w] - r[w] - z)) - sigmoid(beta * (z - p[w + 3] + r[w + 3]))) / 2.0)
        .sum::<f64>()
        / 3.0;
    assert!((with - expected).abs() < 1e-9, "{with} {expected} {plain}");
}

/// The derivative by one weight of the last norm is that of the loss of a model that has it a little larger.
fn assert_slope(policy: &HfFolder, reference: &HfFolder, pairs: &Preference, gradient: &[f64], loss: PreferenceLoss) {
    struct Moved<'a>(&'a HfFolder, f64);

    impl WeightSource for Moved<'_> {
        fn read(
            &self,
            name: &str,
            shape: &[usize],
            ranges: &[std::ops::Range<usize>],
        ) -> Result<Vec<f64>, backend_dist::launch::BoxError> {
            let mut values = self.0.read(name, shape, ranges)?;
            if shape.len() == 1 && name.contains("norm") && !name.contains("layers") {
                values[3] += self.1;
            }
            Ok(values)
        }
    }
    let with = Settings { exact: true, gradients: false, ..settings("TP1") };
    let step = 1e-4;
    let of = |by: f64| {
        let moved = Moved(policy, by);
        preference((policy.config(), &moved), (reference.config(), reference), pairs, &with).unwrap().loss
    };
    let quotient = (of(step) - of(-step)) / (2.0 * step);
    assert!(
        (quotient - gradient[3]).abs() < 1e-5 * gradient[3].abs().max(1e-2),
        "{loss:?}: {quotient} {}",
        gradient[3]
    );
}

/// What assistants say is learned, with the `w4` that ends it.
pub(super) const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'assistant' %}w3 w7 {% generation %}{{ m.content }} w4 \
    {% endgeneration %}{% else %}w3 w6 {{ m.content }} w4 {% endif %}{% endfor %}{% if add_generation_prompt %}w3 w7 {% endif %}";

/// A model with a chat template, and pairs of different lengths.
fn prepared(folder: &Path) {
    model(folder);
    fs::write(folder.join("chat_template.jinja"), TEMPLATE).unwrap();
    let words = |seed: usize, count: usize| {
        (0..count).map(|at| format!("w{}", 10 + (seed * 37 + at * 53) % 140)).collect::<Vec<_>>().join(" ")
    };
    let row = |at: usize| json!({"prompt": words(at, 3 + at % 4), "chosen": words(at + 50, 2 + at % 5), "rejected": words(at + 90, 4 + at % 3)});
    fs::write(folder.join("pairs.jsonl"), (0..15).map(|at| row(at).to_string() + "\n").collect::<String>()).unwrap();
}

fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
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
fn trained(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> Vec<Line> {
    super::trained(&config(folder, name, overrides));
    log(folder, name)
}

const COMPARED: [&str; 6] =
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

#[test]
fn a_run_that_resumes_knows_its_reference_again() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let run = |name: &str, overrides: &[(&str, &str)]| {
        let saves = folder.path().join(name).join("checkpoints").display().to_string();
        trained(
            folder.path(),
            name,
            &[
                overrides,
                &[
                    ("checkpoint.directory", saves.as_str()),
                    ("data.samples", "24"),
                    ("lr.decay", "6 steps"),
                    ("evaluation.every", "6"),
                ],
            ]
            .concat(),
        )
    };
    let whole = run("whole", &[]);
    run("parts", &[("training.steps", "3")]);
    let parts = run("parts", &[]);
    let steps = |lines: &[Line]| -> Vec<_> { lines.iter().filter(|line| line["kind"] == "train").cloned().collect() };
    let (whole, parts) = (steps(&whole), steps(&parts));
    assert_eq!(parts.len(), 6);
    for (a, b) in parts.iter().zip(&whole) {
        assert_eq!(COMPARED.map(|key| &a[key]), COMPARED.map(|key| &b[key]));
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
