use std::path::Path;

use backend_dist::mesh::ParallelLayout;
use models::{FamilyConfig, GptConfig, LlamaConfig};

use super::*;
use crate::engine::{CommWord, ContextConfig};
use crate::lr::{LrDecay, Span, WsdDecay};
use crate::optim::{AdamWConfig, LionConfig, MuonConfig, OptimizerConfig, SgdConfig};
use crate::schedule::ScheduleKind;
use models::recompute::{Granularity, Method, Module};

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
    assert_eq!((config.data.samples, config.evaluation.every, config.checkpoint.every), (8000, 100, Some(100)));
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
        good(TEXT, &[("model.hf", &hf), ("checkpoint.keep-every", "500"), ("parallel.sp", "true")]),
        good("[optimizer]\nkind = \"muon\"\nscale = \"unit-rms\"\n", &[("log.trace", "trace.json")]),
        good("[training]\ndtype = \"f16\"\n[loss-scale]\ninit = 1024\n", &[("optimizer.kind", "sgd")]),
        good("[pipeline]\nlayout = \"Et|tL\"\nschedule = \"zb-h1\"\n", &[("parallel.pp", "2")]),
        good("[recompute]\ngranularity = \"selective\"\nmodules = [\"norms\"]\n", &[]),
        good("[recompute]\ngranularity = \"full\"\nmethod = \"block\"\n", &[]),
    ];
    for run in runs {
        let text = run.to_toml();
        assert_eq!(RunConfig::parse("elsewhere.toml", &text, &[]), Ok(run), "{text}");
    }
}

#[test]
fn every_key_is_printed_with_its_meaning() {
    let adamw = "[training]\ndtype = \"f16\"\n[recompute]\ngranularity = \"full\"\n[fp8]\nformat = \"hybrid\"\n";
    let texts = [good(adamw, &[]), good("[recompute]\ngranularity = \"selective\"\n", &[("optimizer.kind", "muon")])];
    let texts = texts.map(|config| config.to_toml());
    for key in KEYS.iter().filter(|key| key.path != "model.preset") {
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
fn unknown_keys_are_named_with_place_and_closest_key() {
    let file = "[training]\nstep = 3\n[trainig]\nseed = 1\n[model]\nhiden_size = 5\n[data]\nmicro-batch = 2\n";
    assert_eq!(
        refusal(file, &[("lr.wramup", "1"), ("model.num-layers", "3"), ("steps", "5")]),
        "7 problems\n  \
         run.toml:2: unknown key `training.step`; did you mean `training.steps`?\n  \
         run.toml:4: unknown key `trainig.seed`; did you mean `training.seed`?\n  \
         run.toml:8: unknown key `data.micro-batch`; did you mean `training.micro-batch`?\n  \
         command line: unknown key `lr.wramup`; did you mean `lr.warmup`?\n  \
         command line: unknown key `steps`; did you mean `training.steps`?\n  \
         run.toml:6: unknown key `model.hiden_size` for family llama; did you mean `model.hidden-size`?\n  \
         command line: unknown key `model.num-layers` for family llama; did you mean `model.num-hidden-layers`?"
    );
    assert_eq!(refusal("[outptu]\n", &[]), "run.toml:1: unknown key `outptu`; did you mean `output`?");
    assert!(parse("[output]\n", &[]).is_ok());
    assert_eq!(refusal("training = 3\n", &[]), "run.toml:1: `training` is a section: write [training]");
}

#[test]
fn wrong_values_are_named_with_key_and_legal_values() {
    let file = "[training]\nsteps = \"many\"\ndtype = \"f8\"\n[model]\nhidden-size = 1.5\n";
    assert_eq!(
        refusal(file, &[("lr.max", "high")]),
        "4 problems\n  \
         run.toml:2: training.steps = \"many\" is not a whole number of at least 1\n  \
         run.toml:3: training.dtype = \"f8\" is not one of f32, f64, bf16, f16\n  \
         command line: lr.max = high is not a finite number\n  \
         run.toml:5: model.hidden-size = 1.5 is not a whole number of at least 0"
    );
    let said = refusal("[model]\nrope-scaling = { factor = 8 }\n", &[]);
    assert!(
        said.starts_with("run.toml:2: model.rope-scaling = { factor = 8 } is not") && said.contains("low_freq"),
        "{said}"
    );
}

#[test]
fn a_model_is_a_folder_a_preset_or_a_family() {
    assert_eq!(
        refusal("[model]\npreset = \"gpt3\"\n", &[]),
        "model.preset = gpt3 is not one of tiny, llama3-1b, llama3-8b, mistral-7b, qwen3-0.6b, mixtral-tiny, mixtral-8x7b, mixtral-8x7b-half, qwen3-30b-a3b, gpt-tiny, gpt2, deepseek-tiny, deepseek-v3, moonlight-16b; did you mean `gpt2`?"
    );
    assert_eq!(
        refusal("[model]\npreset = \"gpt2\"\nhf = \"x\"\n", &[]).lines().next(),
        Some("model.hf = x and model.preset = gpt2: only one can be the model")
    );
    assert_eq!(
        refusal("[model]\npreset = \"gpt2\"\nfamily = \"llama\"\n", &[]),
        "model.family = llama, but model.preset gpt2 is gpt"
    );
    assert!(refusal("[model]\nhf = \"no/such\"\n", &[]).starts_with("model.hf: no/such/config.json: "));

    let family = "[model]\nfamily = \"llama\"\nvocab-size = 100\nhidden-size = 48\nintermediate-size = 96\nnum-attention-heads = 4\n";
    assert_eq!(
        refusal(family, &[]),
        "model.num-hidden-layers is missing: a family has no sizes of its own, presets have"
    );
    let FamilyConfig::Llama(sizes) = good(family, &[("model.num-hidden-layers", "3")]).model.config else {
        panic!("a Llama")
    };
    assert_eq!((sizes.num_hidden_layers, sizes.num_key_value_heads, sizes.head_dim), (3, 4, 12));
    assert_eq!(sizes.max_position_embeddings, 128, "as long as the rows");
    let gpt = good("[model]\npreset = \"gpt-tiny\"\n", &[]).model.config;
    assert_eq!(gpt, FamilyConfig::Gpt(GptConfig::tiny()));
}

#[test]
fn a_tokenizer_made_here_gives_the_vocabulary() {
    let vocabulary = |overrides: &[(&str, &str)]| models::ModelConfig::vocab_size(&good(TEXT, overrides).model.config);
    assert_eq!(vocabulary(&[]), 1024);
    assert_eq!(vocabulary(&[("data.bpe-size", "300")]), 300);
    assert_eq!(vocabulary(&[("data.tokenizer", "byte")]), 257);
    assert_eq!(vocabulary(&[("model.vocab-size", "2000")]), 2000);
    assert_eq!(vocabulary(&[("data.tokenizer", "some/tokenizer.json")]), 256, "the preset's");
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

    let longer = [("training.steps", "2000"), ("model.hidden-size", "32")];
    let said = check(&longer, &[]).unwrap_err();
    assert_eq!(said.lines().count(), 4, "{said}");
    for part in [
        "model.hidden-size was 64 when the checkpoint was saved, now it is 32; give it the old value, or --allow-change model.hidden-size",
        "lr.decay was \"1000 steps\"",
        "data.samples was 8000 when",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert_eq!(check(&longer, &["model.hidden_size", "lr.lr-decay-iters", "data"]), Ok(()));
    assert!(check(&[], &["lr.deacy"]).unwrap_err().contains("did you mean `lr.decay`?"));
    assert_eq!(before.check_changes(&serde_json::Value::Null, &[]), Ok(()), "imported weights have no configuration");
}

#[test]
fn contradictions_are_found_together() {
    let said = contradiction(
        "[parallel]\ntensor-parallel = 3\ndata-parallel = 2\n[training]\nglobal-batch = 3\nclip = 0\n[lr]\nmin = 1\n\
         [optimizer]\nbeta1 = 1\n[data]\nsplit = \"1\"\nprefixes = [\"a\"]\nweights = [1, 2]\neod-mask-loss = true\n",
    );
    for part in [
        "8 problems",
        "model and parallel: tensor-parallel 3 does not divide the model's attention heads (8); nearest legal: 2, 4",
        "training: `global-batch 3` is not a multiple of micro-batch 1 x data-parallel 2 = 2",
        "training.clip = 0 is not above 0",
        "lr: learning rates need",
        "optimizer.beta1 = 1 is not at least 0 and below 1",
        "data.weights has 2 numbers, data.prefixes 1",
        "data.split = 1,0,0 leaves no validation data for evaluation.batches = 8",
        "data.eod-mask-loss needs",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(contradiction("").contains("data.prefixes or data.text is needed"));
    assert!(contradiction("[parallel]\nep = 2\ndp = 2\n").contains("expert-parallel 2: the model has no experts"));
    let ends = contradiction("[data]\nprefixes = [\"a\"]\nreset-attention-mask = true\nreset-position-ids = true\n");
    assert!(
        ends.contains("data.reset-attention-mask needs") && ends.contains("data.reset-position-ids needs"),
        "{ends}"
    );
    let gpt = "[model]\npreset = \"gpt-tiny\"\nattention-dropout = 1.5\n";
    assert!(contradiction(gpt).contains("attention_dropout = 1.5 is not at least 0 and below 1"));
    assert!(contradiction("[model]\nnum-key-value-heads = 3\n").contains("num_key_value_heads = 3 does not divide"));
}

#[test]
fn context_parallelism_is_written_as_in_megatron() {
    let file = "[parallel]\ncontext-parallel-size = 4\n[context]\ncp-comm-type = \"a2a+p2p\"\n\
                hierarchical-context-parallel-sizes = [2, 2]\n[data]\nprefixes = [\"a\"]\n";
    let config = good(file, &[]);
    assert_eq!(config.context, ContextConfig::all(CommWord::A2aP2p, 2, 4));
    assert_eq!(config.check(), Ok(()));
    let lists = good(file, &[("context.comm-type", "p2p,all_gather,a2a")]);
    assert_eq!(lists.context.comm_type, [CommWord::P2p, CommWord::AllGather, CommWord::A2a]);
    let said = contradiction(&format!("{file}[training]\nseq-length = 60\n"));
    assert!(
        said.contains("sequence length 60 is not a multiple of 8") && said.contains("nearest legal: 56, 64"),
        "{said}"
    );
    let said = contradiction("[parallel]\ncp = 2\n[context]\ncomm-type = [\"p2p\", \"a2a\", \"p2p\"]\n");
    assert!(said.contains("context: cp-comm-type has 3 entries"), "{said}");
    let dynamic = "[parallel]\ndp = 4\n[context]\nhybrid-context-parallel = true\n";
    let said = contradiction(dynamic);
    assert!(said.contains("needs max-seqlen-per-dp-cp-rank") && said.contains("data.reset-position-ids"), "{said}");
    let limit = good(dynamic, &[("context.max-seqlen-per-dp-cp-rank", "32")]).context;
    assert_eq!((limit.dynamic, limit.max_tokens_per_rank), (true, Some(32)));
}

#[test]
fn schedules_are_written_in_steps_or_samples() {
    let file = "[lr]\nwarmup = \"640 samples\"\ndecay = 50\n[lr.form.wsd]\ntail = \"10 steps\"\nform = \"linear\"\n";
    let lr = good(file, &[]).lr;
    assert_eq!((lr.warmup, lr.decay), (Span::Samples(640), Span::Steps(50)));
    assert_eq!(lr.form, LrDecay::Wsd { tail: Span::Steps(10), form: WsdDecay::Linear });
}

#[test]
fn every_optimizer_has_its_own_keys_and_defaults() {
    let kind = |kind: &str| good("", &[("optimizer.kind", kind)]).optimizer;
    assert_eq!(kind("sgd"), OptimizerConfig::Sgd(SgdConfig::default()));
    assert_eq!(kind("lion"), OptimizerConfig::Lion(LionConfig::default()));
    assert_eq!(kind("muon"), OptimizerConfig::Muon(MuonConfig::default()));
    let lion = "[optimizer]\noptimizer = \"lion\"\nlion-beta2 = 0.99\n";
    assert_eq!(good(lion, &[]).optimizer, OptimizerConfig::Lion(LionConfig { beta2: 0.99, ..LionConfig::default() }));

    assert_eq!(
        refusal("[optimizer]\nkind = \"sgd\"\nbeta2 = 0.9\n", &[]),
        "run.toml:3: optimizer.beta2 = 0.9 has no meaning with optimizer.kind = sgd; only with adamw, lion, muon"
    );
    assert!(refusal("", &[("optimizer.ns-steps", "3")]).contains("with optimizer.kind = adamw; only with muon"));
    // The command line takes another optimizer than the file, whose constants then do not count.
    let file = "[optimizer]\nbeta1 = 0.8\neps = 1e-6\n";
    assert_eq!(good(file, &[]).optimizer, AdamWConfig { beta1: 0.8, eps: 1e-6, ..AdamWConfig::default() }.into());
    assert_eq!(good(file, &[("optimizer.kind", "sgd")]).optimizer, OptimizerConfig::Sgd(SgdConfig::default()));
    assert!(contradiction("[optimizer]\nkind = \"sgd\"\nmomentum = 1\n").contains("optimizer.momentum = 1 is not"));
}

#[test]
fn pipelines_are_checked_before_anything_starts() {
    let head =
        "[training]\nglobal-batch = 8\nmicro-batch = 1\n[model]\nnum-hidden-layers = 6\n[data]\ntext = [\"a\"]\n";
    let with = |overrides: &[(&str, &str)]| good(head, overrides);
    let said = |overrides: &[(&str, &str)]| with(overrides).check().unwrap_err().to_string();
    let run = with(&[("parallel.pp", "2"), ("pipeline.decoder-first-pipeline-num-layers", "2")]);
    assert_eq!(run.check(), Ok(()));
    let job = run.job().unwrap();
    assert_eq!((job.schedule.kind, job.stages.layer_counts()), (ScheduleKind::OneFOneB, vec![2, 4]));
    assert_eq!(
        said(&[("parallel.pp", "4")]),
        "pipeline: layers 6 do not divide over 4 ranks of 1 stages; nearest legal: layers 4, 8, or pipeline-layout \
         Et|(tt|)*2tL"
    );
    let v = [("parallel.pp", "2"), ("parallel.vpp", "3"), ("pipeline.schedule", "zb-v")];
    assert_eq!(said(&v), "pipeline: virtual-pipeline 3 does not fit schedule zb-v; nearest legal: 2");
    let groups = [("parallel.pp", "2"), ("parallel.vpp", "3"), ("pipeline.group-size", "9")];
    assert!(said(&groups).contains("nearest legal: microbatch-group-size 8"), "{}", said(&groups));
    assert!(said(&[("parallel.vpp", "2")]).contains("virtual-pipeline 2 needs pipeline-parallel 2"));
}

#[test]
fn what_is_recomputed_is_written_as_in_megatron() {
    let file =
        "[recompute]\nrecompute-granularity = \"selective\"\nrecompute-modules = [\"core_attn\", \"layernorm\"]\n";
    let recompute = good(file, &[]).recompute;
    assert_eq!(recompute.modules, [Module::CoreAttention, Module::Norms]);
    let full = [("recompute.granularity", "full"), ("recompute.method", "block"), ("recompute.num-layers", "3")];
    let recompute = good(file, &full).recompute;
    assert_eq!((recompute.granularity, recompute.method, recompute.num_layers), (Granularity::Full, Method::Block, 3));
    assert_eq!(
        refusal(file, &[("recompute.num-layers", "3")]),
        "command line: recompute.num-layers = 3 has no meaning with recompute.granularity = selective; only with full"
    );
    let empty = "[recompute]\ngranularity = \"selective\"\nmodules = []\n";
    assert!(contradiction(empty).contains("recompute.modules is empty"));
}

#[test]
fn loss_scales_belong_to_fp16() {
    let f16 =
        good("[training]\ndtype = \"f16\"\n[loss-scale]\ninitial-loss-scale = 1024\nloss-scale-window = 7\n", &[]);
    assert_eq!((f16.loss_scale.initial_scale, f16.loss_scale.growth_interval), (1024.0, 7));
    assert_eq!(
        refusal("[loss-scale]\nmin = 2\n", &[]),
        "run.toml:2: loss-scale.min-scale = 2.0 has no meaning with training.dtype = f32; only with f16"
    );
    let low = "[training]\ndtype = \"f16\"\n[loss-scale]\ninit = 1\nmin = 2\n";
    assert!(contradiction(low).contains("loss-scale.initial-scale = 1 is below loss-scale.min-scale = 2"));
}
