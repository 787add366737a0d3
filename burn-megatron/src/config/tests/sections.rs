//! Sections with rules of their own.

use super::*;
use crate::engine::{CommWord, ContextConfig};
use crate::lr::{LrDecay, WeightDecayConfig, WeightDecayIncr, WsdDecay};
use crate::optim::{AdamWConfig, LionConfig, MuonConfig, SgdConfig};
use models::GptConfig;
use models::recompute::{Granularity, Method, Module};

#[test]
fn a_model_is_a_folder_a_preset_or_a_family() {
    let presets = models::ModelConfig::presets().into_iter().map(|(name, _): (_, FamilyConfig)| name);
    let presets: Vec<&str> = presets.chain(module_presets().map(|(name, _)| name)).collect();
    says!(refusal("[model]\npreset = \"bert-bse\"\n", &[]), "did you mean `bert-base`?");
    assert_eq!(
        refusal("[model]\npreset = \"gpt3\"\n", &[]),
        format!("model.preset = gpt3 is not one of {}; did you mean `gpt2`?", presets.join(", "))
    );
    assert_eq!(
        refusal("[model]\npreset = \"gpt2\"\nhf = \"x\"\n", &[]).lines().next(),
        Some("model.hf = x and model.preset = gpt2: only one can be the model")
    );
    assert_eq!(
        refusal("[model]\npreset = \"gpt2\"\nfamily = \"llama\"\n", &[]),
        "model.family = llama, but model.preset gpt2 is gpt"
    );
    says!(refusal("[model]\nhf = \"no/such\"\n", &[]), "model.hf: no/such: there is no such folder");

    let family = "[model]\nfamily = \"llama\"\nvocab-size = 100\nhidden-size = 48\nintermediate-size = 96\nnum-attention-heads = 4\n";
    assert_eq!(
        refusal(family, &[]),
        "model.num-hidden-layers is missing: a family has no sizes of its own, presets have"
    );
    let FamilyConfig::Llama(sizes) = good(family, &[("model.num-hidden-layers", "3")]).model.config else {
        panic!("a Llama")
    };
    assert_eq!((sizes.num_hidden_layers, sizes.num_key_value_heads, sizes.head_dim), (3, 4, 12));
    assert_eq!(sizes.max_position_embeddings, 128, "the sequence length");
    let gpt = good("[model]\npreset = \"gpt-tiny\"\n", &[]).model.config;
    assert_eq!(gpt, FamilyConfig::Gpt(GptConfig::tiny()));
}

#[test]
fn tokens_need_no_tokenizer_that_is_not_read() {
    let folder = hf("llama3");
    let file = folder.path().join("tokenizer.model");
    std::fs::write(&file, "hello").unwrap();
    let tokenizer = |key: &str| {
        good("", &[("model.hf", folder.path().to_str().unwrap()), (key, "x")])
            .data
            .tokenizer
            .map(std::path::PathBuf::from)
    };
    assert_eq!((tokenizer("data.prefixes"), tokenizer("data.text")), (None, Some(file.clone())));
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/tokenizers/llama2.model");
    std::fs::copy(golden, &file).unwrap();
    assert_eq!(tokenizer("data.prefixes"), Some(file));
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
fn context_parallelism_is_written_as_in_megatron() {
    let file = "[parallel]\ncontext-parallel-size = 4\n[context]\ncp-comm-type = \"a2a+p2p\"\n\
                hierarchical-context-parallel-sizes = [2, 2]\n[data]\nprefixes = [\"a\"]\n";
    let config = good(file, &[]);
    assert_eq!(config.context, ContextConfig::all(CommWord::A2aP2p, 2, 4));
    assert_eq!(config.check(), Ok(()));
    let lists = good(file, &[("context.comm-type", "p2p,all_gather,a2a")]);
    assert_eq!(lists.context.comm_type, [CommWord::P2p, CommWord::AllGather, CommWord::A2a]);
    let said = contradiction(&format!("{file}[training]\nseq-length = 60\n"));
    says!(said, "sequence length 60 is not a multiple of 8", "nearest legal: 56, 64");
    let said = contradiction("[parallel]\ncp = 2\n[context]\ncomm-type = [\"p2p\", \"a2a\", \"p2p\"]\n");
    says!(said, "context.comm-type has 3 entries");
    let dynamic = "[parallel]\ndp = 4\n[context]\nhybrid-context-parallel = true\n";
    says!(contradiction(dynamic), "needs context.max-tokens-per-rank", "data.reset-position-ids");
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

/// Megatron's `--train-samples`: the length of training, not of the sample order.
#[test]
fn training_is_as_long_as_its_samples() {
    let steps = |text: &str, overrides: &[(&str, &str)]| good(text, overrides).training.steps;
    let file = "[training]\ntrain-samples = 4800\nglobal-batch = 16\n";
    let config = good(file, &[]);
    assert_eq!((config.training.steps, config.data.samples, config.lr.decay), (300, 4800, Span::Steps(300)));
    assert!(config.to_toml().contains("\nsteps = 300 ") && !config.to_toml().contains("4800 samples"));
    assert_eq!(steps(&format!("{file}steps = 300\n"), &[]), 300, "they agree");
    // The command line overrides the file, whichever of the two it names.
    assert_eq!([steps(file, &[("training.steps", "5")]), steps("", &[("training.train-samples", "80")])], [5, 10]);
    assert_eq!(steps("[training]\nsteps = 7\n", &[("training.samples", "80")]), 10);
    assert_eq!(
        refusal("", &[("training.samples", "100")]),
        "command line: training.samples = 100 are not the samples of whole steps; nearest legal: 96 or 104"
    );
    assert!(refusal("", &[("training.samples", "3")]).ends_with("nearest legal: 8"));
    assert_eq!(
        refusal(&format!("{file}steps = 7\n"), &[]),
        "run.toml:2: training.samples = 4800 makes 300 steps, but training.steps makes 7: give only one of the two"
    );
    let said = refusal("[data]\ntrain-samples = 10\n", &[]);
    says!(said, "unknown key `data.train-samples`; did you mean `training.samples`?");
}

/// `--train-tokens`, and the steps of `--rampup-batch-size`.
#[test]
fn training_is_as_long_as_its_tokens_and_its_ramp() {
    let steps = |overrides: &[(&str, &str)]| good("", overrides).training.steps;
    assert_eq!(steps(&[("training.train-tokens", "10240")]), 10, "8 sequences of 128 tokens");
    assert_eq!(steps(&[("training.tokens", "10240"), ("training.samples", "80")]), 10, "they agree");
    assert!(refusal("", &[("training.tokens", "10241")]).ends_with("nearest legal: 10240 or 11264"));
    let said = refusal("", &[("training.tokens", "10240"), ("training.samples", "88")]);
    assert!(
        said.ends_with(
            "training.tokens = 10240 makes 10 steps, but training.samples makes 11: give only one of the two"
        ),
        "{said}"
    );

    // 2, 2, 4, 6, then 8 sequences: Megatron's `update_train_iters` has as many steps.
    let ramp = ("training.rampup-batch-size", "2 2 12");
    let config = good(TEXT, &[ramp, ("training.samples", "30"), ("lr.warmup", "3")]);
    assert_eq!(config.check(), Ok(()));
    assert_eq!((config.training.steps, config.data.samples, config.tokens()), (6, 30, 30 * 128));
    let lr = config.lr.schedule(config.engine().batch_sizes()).unwrap();
    assert_eq!((lr.at(8), lr.at(30)), (3e-4, 0.0), "the warm-up ends with its third step");
    assert!(refusal("", &[ramp, ("training.samples", "33")]).ends_with("nearest legal: 30 or 38"));
    let said = |overrides: &[(&str, &str)]| good(TEXT, overrides).check().unwrap_err().to_string();
    let two = [("parallel.dp", "2"), ("training.micro-batch", "2"), ("training.rampup-batch-size", "2,2,12")];
    let text = said(&two);
    says!(text, "`rampup-batch-size = [2, 2, 12]`");
    assert!(text.ends_with("= 4; nearest legal: [4, 4, 12]"), "{text}");
    let interleaved = [
        ("parallel.pp", "2"),
        ("parallel.vpp", "2"),
        ("training.rampup-batch-size", "2 1 12"),
        ("model.num-hidden-layers", "4"),
    ];
    let text = said(&interleaved);
    assert!(text.starts_with("training.rampup-batch-size and pipeline: "), "{text}");
    assert_eq!(refusal("", &[("training.rampup-batch-size", "2 2")]).lines().count(), 1);
}

#[test]
fn weight_decay_grows_as_in_megatron() {
    let file = "[optimizer]\nend-weight-decay = 0.1\n[weight-decay]\nstart-weight-decay = 0.01\n\
                weight-decay-incr-style = \"cosine\"\n[training]\nsteps = 50\n";
    let config = good(file, &[]);
    let decay = WeightDecayConfig { incr_style: WeightDecayIncr::Cosine, start: 0.01, length: Some(Span::Steps(50)) };
    assert_eq!((config.weight_decay, config.engine().weight_decay), (decay, decay));
    assert_eq!(config.optimizer.weight_decay(), 0.1);
    assert_eq!(good(&config.to_toml(), &[]), RunConfig { output: good("", &[]).output, ..config });
    let samples = good(file, &[("weight-decay.length", "400 samples")]).weight_decay;
    assert_eq!(samples.length, Some(Span::Samples(400)));
    // A constant decay has no length, so that a run may be extended.
    assert_eq!(good("", &[("training.steps", "7")]).weight_decay, WeightDecayConfig::default());
    assert_eq!(
        refusal("[weight-decay]\nstart = 0.1\n", &[]),
        "run.toml:2: weight-decay.start = 0.1 has no meaning with weight-decay.incr-style = constant; only with linear, cosine"
    );
    let down = format!("{file}[data]\ntext = [\"a\"]\n[model]\npreset = \"tiny\"\n").replace("0.01", "0.2");
    assert_eq!(
        contradiction(&down),
        "`weight-decay.start` = 0.2 is not from 0 to `optimizer.weight-decay` = 0.1; nearest legal: 0.1"
    );
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
