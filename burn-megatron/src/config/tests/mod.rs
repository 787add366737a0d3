//! Configurations from defaults, models, files and command lines, and their round trip through TOML.

mod hostile;
mod refusals;
mod sections;
mod world;

use std::path::Path;

use backend_dist::mesh::ParallelLayout;
use models::{FamilyConfig, LlamaConfig, ModelConfig};

use super::*;
use crate::checkpoint::SaveEvery;
use crate::lr::Span;
use crate::optim::OptimizerConfig;

fn parse(text: &str, overrides: &[(&str, &str)]) -> Result<RunConfig, ConfigErrors> {
    let overrides: Vec<(String, String)> =
        overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    RunConfig::parse("run.toml", text, &overrides)
}

fn good(text: &str, overrides: &[(&str, &str)]) -> RunConfig {
    parse(text, overrides).unwrap_or_else(|errors| panic!("{errors}"))
}

fn refusal(text: &str, overrides: &[(&str, &str)]) -> String {
    parse(text, overrides).unwrap_err().to_string()
}

fn contradiction(text: &str) -> String {
    good(text, &[]).check().unwrap_err().to_string()
}

const TEXT: &str = "[data]\ntext = [\"book.txt\"]\n";

fn hf(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/golden/hf/{name}/config.json"));
    std::fs::copy(golden, folder.path().join("config.json")).unwrap();
    folder
}

#[test]
fn defaults_are_those_of_the_parts() {
    let config = good("", &[]);
    assert_eq!(config.optimizer, OptimizerConfig::default());
    assert_eq!((config.recompute.clone(), config.loss_scale), Default::default());
    assert_eq!(config.parallel, ParallelLayout::default());
    assert_eq!(config.model.config, FamilyConfig::Llama(LlamaConfig::tiny()));
    assert_eq!(config.lr.decay, Span::Steps(1000));
    let intervals = (config.data.samples, config.evaluation.every, config.checkpoint.every);
    assert_eq!(intervals, (8000, 100, SaveEvery::Auto));
    assert_eq!(config.output.directory, Path::new("runs/run"));
    assert_eq!(config.checkpoint.directory.as_deref(), Some(Path::new("runs/run/checkpoints")));
    assert_eq!(good(TEXT, &[]).check(), Ok(()));
}

#[test]
fn what_is_printed_reads_the_same() {
    let folder = hf("llama3");
    let hf = folder.path().display().to_string();
    let runs = [
        good("", &[]),
        good("[model]\npreset = \"llama3-1b\"\nrope-scaling = \"none\"\n", &[("training.clip", "none")]),
        good("[model]\npreset = \"llama3-1b\"\n", &[("lr.form", "{ wsd = { tail = 5, form = \"minus-sqrt\" } }")]),
        good("[data]\nprefixes = [\"a b\", \"c\"]\nweights = [0.3, 1]\neod-id = 0\n", &[("optimizer.eps", "1e-15")]),
        good(
            "[data]\nprefixes = \"a\"\nvalidation = \"b\"\n",
            &[("data.validation-weights", "2"), ("data.test", "c,d")],
        ),
        good("[anomaly]\nspike = \"roll-back\"\nroll-back-steps = 20\n", &[("checkpoint.directory", "none")]),
        good(TEXT, &[("model.hf", &hf), ("checkpoint.keep-every", "500"), ("parallel.sp", "true")]),
        good("[optimizer]\nkind = \"muon\"\nscale = \"unit-rms\"\n", &[("log.trace", "trace.json")]),
        good("[training]\ndtype = \"f16\"\n[loss-scale]\ninit = 1024\n", &[("optimizer.kind", "sgd")]),
        good("[pipeline]\nlayout = \"Et|tL\"\nschedule = \"zb-h1\"\n", &[("parallel.pp", "2")]),
        good("[pipeline]\npasses = \"\"\"\n0F0 0B0\n1F0 1B0\n\"\"\"\n", &[("parallel.pp", "2")]),
        good("[recompute]\ngranularity = \"selective\"\nmodules = [\"norms\"]\n", &[]),
        good("[training]\ndtype = \"bf16\"\n", &[("optimizer.main-params-dtype", "bf16-remainder")]),
        good("[optimizer]\ncpu-offload = true\n", &[("optimizer.offload-fraction", "0.5")]),
        good("[optimizer]\nexp-avg-dtype = \"bf16\"\n", &[("optimizer.exp-avg-sq-dtype", "bf16")]),
        good("[optimizer]\nexp-avg-dtype = \"8bit\"\n", &[("optimizer.exp-avg-sq-dtype", "8bit")]),
        good("[recompute]\ngranularity = \"full\"\nmethod = \"block\"\n", &[]),
        good("[weight-decay]\nincr-style = \"linear\"\nstart = 0.001\n", &[]),
        good("[model]\nrope-scaling = { rope_type = \"linear\", factor = 2.0 }\n", &[]),
        good(
            "[chat]\ntrain = [\"a.jsonl\"]\n[lora]\nrank = 4\ntarget-modules = \"q_proj\"\n",
            &[("chat.too-long", "drop")],
        ),
        good(
            "[grpo]\ntrain = [\"a.jsonl\"]\nepsilon-high = 0.28\nloss-type = \"dapo\"\n",
            &[("grpo.num-generations", "4")],
        ),
        good("[context]\nhierarchical-sizes = \"none\"\nmax-tokens-per-rank = \"none\"\n", &[]),
    ];
    let presets = FamilyConfig::presets().into_iter().map(|(name, _)| good("", &[("model.preset", name)]));
    for run in runs.into_iter().chain(presets) {
        let text = run.to_toml();
        assert_eq!(RunConfig::parse("elsewhere.toml", &text, &[]), Ok(run), "{text}");
    }
}

#[test]
fn every_key_is_printed_with_its_meaning() {
    let adamw = "[training]\ndtype = \"f16\"\nema-decay = 0.9\n[recompute]\ngranularity = \"full\"\n[context]\ncomm-type = \"a2a+p2p\"\n\
                 dynamic = true\n[fp8]\nformat = \"hybrid\"\nrecipe = \"delayed\"\nfirst-last-layers-bf16 = true\n\
                 [weight-decay]\nincr-style = \"linear\"\n[chat]\ntrain = \"a.jsonl\"\n[anomaly]\nspike = \"skip\"\n[lora]\nrank = 4\n[distill]\nteacher = \"t\"\n";
    let pairs = |loss: &str| good(&format!("[preference]\ntrain = \"p.jsonl\"\nloss = \"{loss}\"\n"), &[]);
    let selective = good("[recompute]\ngranularity = \"selective\"\n", &[("optimizer.kind", "muon")]);
    let rewards = good("[grpo]\ntrain = \"q.jsonl\"\n", &[]);
    let texts = [good(adamw, &[]), selective, pairs("simpo"), pairs("kto"), rewards];
    let bert = "[model]\npreset = \"bert-base\"\n[data]\nprefixes = [\"a\"]\ntokenizer = \"t.json\"\n";
    let bert = ModuleConfig::parse("bert.toml", bert, &[]).unwrap().expect("it is one");
    let llava = "[model]\npreset = \"llava-1.5-7b\"\n[data]\ntokenizer = \"t.json\"\n[images]\ntrain = \"a.tar\"\n";
    let llava = ModuleConfig::parse("llava.toml", llava, &[]).unwrap().expect("it is one");
    let texts = texts.iter().map(RunConfig::to_toml).chain([bert, llava].map(|run| run.to_toml())).collect::<Vec<_>>();
    for key in KEYS.iter().filter(|key| !key.is_resolved_away()) {
        let mut lines = texts.iter().flat_map(|text| text.lines());
        let line = lines.find(|line| line.ends_with(key.doc) && line.starts_with(key.name()));
        assert!(line.is_some(), "{}", key.path);
    }
}

#[test]
fn defaults_then_model_then_file_then_command_line() {
    let folder = hf("llama3");
    let from_hf = good("", &[("model.hf", folder.path().to_str().unwrap())]);
    let FamilyConfig::Llama(theirs) = from_hf.model.config.clone() else { panic!("a Llama") };
    assert_ne!(theirs, LlamaConfig::tiny());
    assert_eq!(from_hf.model.hf.as_deref(), Some(folder.path()));

    let file =
        format!("[model]\nhf = {:?}\nhidden_dropout = 0.25\nrope-theta = 7\n[training]\nseed = 5\n", folder.path());
    let FamilyConfig::Llama(sizes) = good(&file, &[("model.rope_theta", "9")]).model.config else { panic!("a Llama") };
    assert_eq!(sizes, LlamaConfig { hidden_dropout: 0.25, rope_theta: 9.0, ..theirs });

    let run = good(&file, &[("training.seed", "6"), ("data.seed", "7"), ("training.seed", "8")]);
    assert_eq!((run.training.seed, run.data.seed), (8, 7), "the last one on the command line wins");
    let preset = good(&file, &[("model.preset", "tiny")]).model;
    assert_eq!(preset.hf, None, "the model named last takes the place of the other");
    let own = good(&file.replace("hidden_dropout = 0.25\nrope-theta = 7\n", ""), &[("model.hf", "none")]).model;
    assert_eq!((own.hf, own.config), (None, FamilyConfig::Llama(LlamaConfig::tiny())), "taken back");
}

/// Published Mamba-2 and Nemotron-H have a number that is no JSON; some editors begin a file with a mark.
#[test]
fn a_folders_configuration_is_as_python_writes_it() {
    let folder = hf("mamba2");
    let path = folder.path().join("config.json");
    let mut json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    json["time_step_limit"] = serde_json::json!([0.0, "end"]);
    std::fs::write(&path, format!("\u{feff}{json}").replace("\"end\"", "Infinity")).unwrap();
    let read = good("", &[("model.hf", folder.path().to_str().unwrap())]);
    assert_eq!(read.model.config, good("", &[("model.hf", hf("mamba2").path().to_str().unwrap())]).model.config);
}

#[test]
fn megatrons_spellings_are_aliases() {
    let file = "[parallel]\ntensor-model-parallel-size = 2\ndata-parallel-size = 2\nsp = true\n[training]\nmicro-batch-size = 4\n";
    let run = good(file, &[("training.train-iters", "7"), ("lr.lr-warmup-iters", "3")]);
    assert_eq!(run.parallel.to_string(), "TP2 SP DP2");
    assert_eq!((run.training.micro_batch, run.training.steps, run.lr.warmup), (4, 7, Span::Steps(3)));
    assert_eq!(
        refusal("[parallel]\ntp = 2\ntensor-parallel = 4\n", &[]),
        "run.toml:3: `parallel.tensor-parallel` and `parallel.tp` are the same key"
    );
}

#[test]
fn what_decides_the_learning_must_not_change_silently() {
    let before = good(TEXT, &[]);
    let saved = serde_json::to_value(&before).unwrap();
    let check = |overrides: &[(&str, &str)], allowed: &[&str]| {
        let allowed: Vec<String> = allowed.iter().map(|name| name.to_string()).collect();
        good(TEXT, overrides).check_changes(&saved, &allowed).map_err(|errors| errors.to_string())
    };
    let free =
        [("parallel.tp", "2"), ("training.micro-batch", "4"), ("evaluation.every", "3"), ("output.directory", "x")];
    assert_eq!(check(&free, &[]), Ok(()));
    assert_eq!(check(&[("optimizer.eps", "1.0000000000000001e-8")], &[]), Ok(()), "the last bit of a float");

    assert_eq!(check(&[("optimizer.cpu-offload", "true")], &[]), Ok(()), "every bit is the same");

    let longer = [("training.steps", "2000"), ("model.hidden-size", "32")];
    let said = check(&longer, &[]).unwrap_err();
    assert_eq!(said.lines().count(), 4, "{said}");
    for part in [
        "model.hidden-size was 64 when the checkpoint was saved, now it is 32; give it the old value, the only one that the saved weights have",
        "lr.decay was \"1000 steps\"",
        "data.samples was 8000 when",
    ] {
        says!(said, part);
    }
    let said = check(&longer, &["model.hidden_size", "lr.lr-decay-iters", "data"]).unwrap_err();
    assert!(said.starts_with("model.hidden-size was 64") && said.lines().count() == 1, "{said}");
    let free = [("training.steps", "2000"), ("model.hidden-dropout", "0.1")];
    says!(check(&free, &[]).unwrap_err(), "or --allow-change model.hidden-dropout");
    assert_eq!(check(&free, &["model.hidden_dropout", "lr.lr-decay-iters", "data"]), Ok(()));
    assert!(check(&[], &["lr.deacy"]).unwrap_err().contains("did you mean `lr.decay`?"));
    assert!(check(&[], &["model.hiden-size"]).unwrap_err().contains("did you mean `model.hidden-size`?"));
    assert_eq!(before.check_changes(&serde_json::Value::Null, &[]), Ok(()), "imported weights have no configuration");
}
