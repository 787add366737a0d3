//! Distillation: a teacher of another size, the same in every layout.

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use burn_megatron::train::{Plan, train, write_top_k};

use super::eval::model;
use super::{Line, assert_same, golden, log, parse};

/// The log of a run of a small model whose teacher is `lora/base`.
fn trained(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> Vec<Line> {
    super::trained(&config(folder, name, overrides));
    log(folder, name)
}

fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> burn_megatron::config::RunConfig {
    let student = "family = \"llama\"\nvocab-size = 160\nhidden-size = 16\nintermediate-size = 24\nnum-hidden-layers = 2\n\
                   num-attention-heads = 2\nnum-key-value-heads = 2\nhead-dim = 8\n";
    let student = if overrides.iter().any(|(key, _)| *key == "model.hf") { "" } else { student };
    let text = format!(
        "[model]\n{student}[training]\nsteps = 5\nglobal-batch = 4\nseq-length = 16\ndtype = \"f64\"\nclip = \"none\"\n\
         [lr]\nmax = 1e-2\n[data]\ntext = [{:?}]\ntokenizer = {:?}\neod-id = 2\nsplit = \"80,20,0\"\n[evaluation]\nbatches = 1\n\
         [checkpoint]\ndirectory = \"none\"\n[distill]\nteacher = {:?}\ntemperature = 2.0\nweight = 0.75\n\
         [output]\ndirectory = {:?}\n",
        folder.join("book.txt"),
        folder.join("tokenizer.json").display().to_string(),
        golden("lora/base"),
        folder.join(name)
    );
    parse(&text, overrides)
}

fn prepared(folder: &Path) {
    model(folder);
    let words: Vec<String> = (0..900).map(|at| format!("w{}", 10 + (at * at + 7 * at) % 140)).collect();
    let paragraphs: Vec<String> = words.chunks(30).map(|words| words.join(" ")).collect();
    fs::write(folder.join("book.txt"), paragraphs.join("\n\n")).unwrap();
}

fn number(line: &Line, key: &str) -> f64 {
    line[key].as_f64().unwrap()
}

fn compare(found: &[Line], expected: &[Line], bound: f64, what: &str) {
    assert_same(found, expected, &["loss", "grad_norm", "teacher_kl"], bound, what);
}

#[test]
fn every_layout_learns_from_the_teacher_as_one_device() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let one = trained(folder.path(), "one", &[]);
    let steps: Vec<_> = one.iter().filter(|line| line["kind"] == "train").collect();
    assert!(number(steps[4], "loss") < number(steps[0], "loss"), "{one:?}");
    // Burn-train writes what the dashboard shows, where a loss that is not of tokens alone is no perplexity.
    let shown = |metric: &str| folder.path().join(format!("one/train/epoch-1/{metric}.log")).exists();
    assert!(shown("KL") && !shown("Perplexity"));
    assert!(folder.path().join("one/valid/epoch-1/KL.log").exists());
    for (index, layout) in [
        vec![("parallel.tp", "2"), ("parallel.sp", "true")],
        vec![("parallel.cp", "2")],
        vec![("parallel.dp", "2"), ("parallel.zero", "3"), ("training.micro-batch", "2")],
        vec![("parallel.tp", "2"), ("parallel.cp", "2"), ("recompute.granularity", "full")],
        vec![("parallel.pp", "2")],
        vec![("parallel.pp", "2"), ("parallel.tp", "2"), ("parallel.sp", "true"), ("parallel.dp", "2")],
        vec![("parallel.pp", "2"), ("pipeline.schedule", "zb-h1"), ("parallel.cp", "2")],
    ]
    .into_iter()
    .enumerate()
    {
        let other = trained(folder.path(), &format!("layout{index}"), &layout);
        compare(&other, &one, 1e-10, &format!("{layout:?}"));
    }
    let held_out = one.iter().find(|line| line["kind"] == "valid").unwrap();
    assert!(number(held_out, "teacher_kl") > 0.01, "{held_out:?}");
    // Two stages on each rank; in a V the last is on the first rank.
    let deep = [("model.num-hidden-layers", "4")];
    let one = trained(folder.path(), "deep", &deep);
    for last in [("pipeline.schedule", "zb-v"), ("parallel.virtual-pipeline", "2")] {
        let other = trained(folder.path(), last.1, &[deep[0], ("parallel.pp", "2"), last]);
        compare(&other, &one, 1e-10, last.0);
    }
}

/// The file of the likeliest tokens of `lora/base` for a run.
fn top_k(folder: &Path, k: usize) -> String {
    let path = folder.join(format!("top{k}.safetensors"));
    let plan = Plan::new(&config(folder, "teach", &[]), &[]).unwrap();
    let written = write_top_k(&plan, &Device::flex(), &path, k, &mut |_| ()).unwrap();
    assert_eq!(written, 20, "five steps of four sequences");
    path.display().to_string()
}

#[test]
fn every_layout_learns_from_a_file_as_one_device() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let (all, few) = (top_k(folder.path(), 160), top_k(folder.path(), 8));
    let from = |name: &str, file: &str, layout: &[(&str, &str)]| {
        let keys = [("distill.teacher", "none"), ("distill.logits", file)];
        trained(folder.path(), name, &[&keys[..], layout].concat())
    };
    // All tokens of the vocabulary say what the teacher says; few of them do not.
    let teacher = trained(folder.path(), "teacher", &[]);
    // A file says nothing of held-out data.
    let said = |mut line: Line| {
        line.remove("teacher_kl").filter(|_| line["kind"] == "train").map(|kl| line.insert("teacher_kl".into(), kl));
        line
    };
    let without: Vec<Line> = teacher.iter().cloned().map(said).collect();
    compare(&from("all", &all, &[]), &without, 1e-10, "all tokens");
    let one = from("one", &few, &[]);
    assert!((number(&one[0], "loss") - number(&teacher[0], "loss")).abs() > 1e-3);
    for (index, layout) in [
        vec![("parallel.tp", "2"), ("parallel.sp", "true")],
        vec![("parallel.cp", "2")],
        vec![("parallel.pp", "2"), ("training.micro-batch", "1")],
        vec![("parallel.dp", "2"), ("parallel.zero", "3"), ("training.micro-batch", "2")],
        vec![("parallel.tp", "2"), ("parallel.cp", "2"), ("recompute.granularity", "full")],
    ]
    .into_iter()
    .enumerate()
    {
        compare(&from(&format!("file{index}"), &few, &layout), &one, 1e-10, &format!("{layout:?}"));
    }
}

/// A checkpoint names its data by samples that the run need not read, and that a teacher's file lacks.
#[test]
fn a_run_that_saves_needs_no_sample_that_the_teachers_file_lacks() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let file = top_k(folder.path(), 8);
    let checkpoints = folder.path().join("checkpoints").display().to_string();
    let keys = [("distill.teacher", "none"), ("distill.logits", &file), ("checkpoint.directory", &checkpoints)];
    let steps = trained(folder.path(), "saves", &keys);
    assert_eq!(steps.iter().filter(|line| line["kind"] == "train").count(), 5, "{steps:?}");
    // What a teacher says is not part of the data: the run resumes with the teacher itself.
    trained(folder.path(), "resumes", &[("checkpoint.directory", checkpoints.as_str())]);
    // But not with neither, nor may one come later.
    let alone = [("distill.teacher", "none"), ("checkpoint.directory", &checkpoints)];
    let of = |keys: &[(&str, &str)], allowed: &[String]| {
        Plan::new(&config(folder.path(), "none", keys), allowed).map(drop).map_err(|error| error.to_string())
    };
    says!(of(&alone, &[]).unwrap_err(), "distill.logits was \"", "now it is none", "--allow-change distill.logits");
    assert_eq!(of(&alone, &["distill".into()]), Ok(()));
    let other = folder.path().join("other").display().to_string();
    let other = [("distill.teacher", "none"), ("checkpoint.directory", other.as_str())];
    trained(folder.path(), "plain", &other);
    says!(of(&other[1..], &[]).unwrap_err(), "distill.teacher was none when the checkpoint was saved");
    assert_eq!(of(&other[1..], &["distill".into()]), Ok(()));
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let file = top_k(folder.path(), 8);
    let refused = |overrides: &[(&str, &str)]| {
        let all = [&[("distill.teacher", "none"), ("distill.logits", file.as_str())], overrides].concat();
        let plan = Plan::new(&config(folder.path(), "refused", &all), &[]).unwrap();
        train(&plan, vec![Device::flex()], &mut |_| ()).err().unwrap().to_string()
    };
    says!(refused(&[("training.steps", "6")]), "has 20 sequences, but this run reads 24");
    // Other data, which the shuffled samples of another seed are too.
    let said = refused(&[("training.seed", "7")]);
    says!(said, "has nothing about sample 0; write it with the data, seed, number of steps");
    says!(refused(&[("model.vocab-size", "176")]), "its teacher has 160 tokens, but model.vocab-size = 176");
    let bytes = fs::read(&file).unwrap();
    for (name, part) in [("short", &bytes[..bytes.len() - 1]), ("none", &bytes[..4])] {
        let path = folder.path().join(name);
        fs::write(&path, part).unwrap();
        says!(refused(&[("distill.logits", path.to_str().unwrap())]), &format!("{name}: is no whole safetensors file"));
    }
    says!(refused(&[("distill.temperature", "1")]), "was written with distill.temperature = 2, not 1");
    let said = refused(&[("training.seq-length", "8")]);
    says!(said, "has sequences of 16 tokens; nearest legal: training.seq-length = 16");
    let both = Plan::new(&config(folder.path(), "both", &[("distill.logits", file.as_str())]), &[]).err().unwrap();
    assert!(both.to_string().contains("a file takes the place of a teacher"), "{both}");
    let keys = [("distill.teacher", "none"), ("distill.logits", &*file), ("anomaly.spike", "roll-back")];
    let rolls_back = Plan::new(&config(folder.path(), "back", &keys), &[]).err().unwrap().to_string();
    says!(rolls_back, "roll-back continues with further sequences, of which distill.logits knows nothing");
    let plan = Plan::new(&config(folder.path(), "teach", &[]), &[]).unwrap();
    let none = write_top_k(&plan, &Device::flex(), Path::new("none"), 161, &mut |_| ()).unwrap_err().to_string();
    says!(none, "--top-k 161 of 160 tokens; nearest legal: 160");
}

/// A model that is its own teacher has a divergence of 0 without a gradient.
#[test]
fn a_model_teaches_itself_nothing() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let base = golden("lora/base").display().to_string();
    let one = |name: &str, overrides: &[(&str, &str)]| {
        let all = [&[("model.hf", base.as_str()), ("training.steps", "1"), ("lr.max", "1e-9")], overrides].concat();
        trained(folder.path(), name, &all)
    };
    let plain = one("plain", &[("distill.teacher", "none")]);
    let mixed = one("mixed", &[]);
    let pure = one("pure", &[("distill.weight", "1.0")]);
    for key in ["loss", "grad_norm"] {
        let [plain, mixed, pure] = [&plain, &mixed, &pure].map(|lines| number(&lines[0], key));
        assert!((mixed - 0.25 * plain).abs() < 1e-9 * plain, "{key}: {mixed} {plain}");
        assert!(pure.abs() < 1e-9, "{key}: {pure}");
    }
    let divergences = [&mixed, &pure].map(|lines| number(&lines[0], "teacher_kl"));
    assert!(divergences.iter().all(|kl| kl.abs() < 1e-9) && !plain[0].contains_key("teacher_kl"), "{divergences:?}");
    // Held-out loss is the cross-entropy whatever is learned.
    let valid = |lines: &[Line]| lines.iter().find(|line| line["kind"] == "valid").unwrap().clone();
    let losses = [&plain, &pure].map(|lines| number(&valid(lines), "loss"));
    assert!((losses[0] - losses[1]).abs() < 1e-6, "{plain:?} {pure:?}");
    let divergence = number(&valid(&pure), "teacher_kl");
    assert!(divergence.abs() < 1e-9 && !valid(&plain).contains_key("teacher_kl"), "{divergence}");
}

#[test]
fn teachers_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    prepared(folder.path());
    let refused = |overrides: &[(&str, &str)]| {
        Plan::new(&config(folder.path(), "refused", overrides), &[]).err().unwrap().to_string()
    };
    let other = golden("hf/llama3").display().to_string();
    for (overrides, words) in [
        (vec![("distill.teacher", other.as_str())], "it has 256 tokens, but model.vocab-size = 160"),
        (vec![("distill.weight", "1.5")], "distill.weight = 1.5 is not above 0 and at most 1"),
        (vec![("distill.temperature", "0")], "distill.temperature = 0 is not above 0"),
        (vec![("distill.teacher", "/nowhere")], "distill.teacher = /nowhere"),
    ] {
        says!(refused(&overrides), words);
    }
}
