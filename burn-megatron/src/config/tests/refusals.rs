//! What is wrong is named, with its place and what would be right.

use super::*;
use crate::schedule::ScheduleKind;

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
    for (theirs, ours) in [("ffn_hidden_size", "intermediate-size"), ("num-query-groups", "num-key-value-heads")] {
        let said = refusal(&format!("[model]\n{theirs} = 5\n"), &[]);
        assert!(said.ends_with(&format!("for family llama; did you mean `model.{ours}`?")), "{said}");
    }
    let said = refusal("[model]\nfamily = \"bert\"\n", &[]);
    assert!(said.contains("a plain Burn module has no family: model.preset = bert-base"), "{said}");
    assert_eq!(refusal("[outptu]\n", &[]), "run.toml:1: unknown key `outptu`; did you mean `output`?");
    assert!(parse("[output]\n", &[]).is_ok());
    assert_eq!(refusal("training = 3\n", &[]), "run.toml:1: `training` is a section: write [training]");
    for (value, legal) in [
        ("none", "a text has quotes, write \"none\""),
        ("tiny # small", "a text has quotes, write \"tiny\""),
        ("True", "write true"),
        ("3e-4x", "invalid float, expected nothing"),
        ("\"a", "invalid basic string, expected `\"`"),
    ] {
        assert_eq!(refusal(&format!("[model]\nhf = {value}\n"), &[]), format!("run.toml:2: {legal}: `hf = {value}`"));
    }
    let twice = "[checkpoint]\nasync = true\nasync = true\n";
    assert_eq!(refusal(twice, &[]), "run.toml:3: duplicate key: `async = true`");
    let decay = refusal("weight-decay = 0.1\n", &[]);
    assert!(decay.ends_with("is a section: write [weight-decay]; did you mean `optimizer.weight-decay`?"), "{decay}");
}

#[test]
fn a_name_of_another_section_is_found_in_every_spelling() {
    assert_eq!(refusal("[training]\nlr = 1\n", &[]), "run.toml:2: unknown key `training.lr`; did you mean `lr.max`?");
    assert_eq!(
        refusal("", &[("train-iters", "5")]),
        "command line: unknown key `train-iters`; did you mean `training.steps`?"
    );
}

#[test]
fn a_key_that_another_one_leaves_without_meaning_is_refused() {
    for (key, value, with) in [
        ("context.max-tokens-per-rank", "64", "context.dynamic = false; only with true"),
        ("context.hierarchical-sizes", "2,2", "context.comm-type = p2p; only with a2a+p2p"),
        ("checkpoint.storage", "/copies", "checkpoint.directory = none; only with a folder"),
        ("checkpoint.every", "5", "checkpoint.directory = none; only with a folder"),
        ("checkpoint.keep-last", "3", "checkpoint.directory = none; only with a folder"),
        ("checkpoint.async", "false", "checkpoint.directory = none; only with a folder"),
        ("fp8.amax-history-len", "16", "fp8.recipe = tensorwise; only with delayed"),
        ("fp8.margin", "1", "fp8.recipe = blockwise; only with tensorwise, delayed"),
        ("fp8.experts", "false", "fp8.format = none; only with e4m3, hybrid"),
        ("fp8.num-layers-at-start-in-bf16", "2", "fp8.first-last-layers-bf16 = false; only with true"),
    ] {
        let file = match key {
            "fp8.experts" => "",
            "fp8.margin" => "[fp8]\nformat = \"hybrid\"\nrecipe = \"blockwise\"\n",
            key if key.starts_with("checkpoint.") => "[checkpoint]\ndirectory = \"none\"\n",
            _ => "[fp8]\nformat = \"hybrid\"\n",
        };
        says!(refusal(file, &[(key, value)]), &format!("has no meaning with {with}"));
    }
    let lion = refusal("[optimizer]\nkind = \"lion\"\n", &[("optimizer.exp-avg-dtype", "bf16")]);
    says!(lion, "has no meaning with optimizer.kind = lion; only with adamw");
    let char = "[data]\ntext = [\"a\"]\ntokenizer = \"char\"\n";
    assert!(refusal(char, &[("data.bpe-size", "300")]).contains("data.tokenizer = char; only with bpe"));
    assert!(parse("[data]\nbpe-size = 300\n", &[]).is_ok(), "the text is named later");
    // What the command line changes leaves the file's keys behind, over several steps too.
    let file = "[fp8]\nformat = \"hybrid\"\nrecipe = \"delayed\"\namax-history-len = 16\nfirst-last-layers-bf16 = true\n\
                num-layers-at-end-in-bf16 = 2\n";
    assert!(good(file, &[("fp8.format", "none")]).fp8.format.is_none());
    assert!(contradiction(&format!("{file}{TEXT}")).contains("leave none of 2 layers in FP8"));
    let kept = "[checkpoint]\nevery = 5\nkeep-last = \"none\"\ndirectory = ";
    says!(refusal(&format!("{kept}\"none\"\n"), &[]), "run.toml:2: checkpoint.every = 5 has no meaning");
    assert!(good(&format!("{kept}\"saved\"\n"), &[("checkpoint.directory", "none")]).checkpoint.directory.is_none());
    assert!(parse("[checkpoint]\ndirectory = \"none\"\nkeep-last = \"none\"\nresume = \"never\"\n", &[]).is_ok());
    let copied = good("[checkpoint]\nstorage = \"/copies\"\n", &[]);
    assert_eq!(copied.checkpoint.storage.as_deref(), Some("/copies"), "the folder follows from the output's");
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
    assert_eq!(
        refusal("", &[("training.dtype", "fp32")]),
        "command line: training.dtype = fp32 is not one of f32, f64, bf16, f16; did you mean `f32`?"
    );
    for number in ["18446744073709551615", "99999999999999999999"] {
        let said = refusal(&format!("[training]\nseed = {number}\n"), &[]);
        says!(said, &format!("run.toml:2: {number} is too large a number; the largest is 9223372036854775807"));
        let said = refusal("", &[("training.steps", number)]);
        says!(said, "is not a whole number of at least 1; the largest is 9223372036854775807");
    }
    let said = refusal("[model]\nrope-scaling = { factor = 8 }\n", &[]);
    says!(said, "low_freq");
    assert!(said.starts_with("run.toml:2: model.rope-scaling = { factor = 8 } is not"), "{said}");
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
        says!(said, part);
    }
    let states = "exp-avg-sq-dtype = \"bf16\"\nmain-params-dtype = \"bf16-remainder\"\n";
    let double = contradiction(&format!("[training]\ndtype = \"f64\"\n[optimizer]\n{states}"));
    let mixed = contradiction("[optimizer]\nexp-avg-dtype = \"8bit\"\nexp-avg-sq-dtype = \"bf16\"\n");
    let said =
        "optimizer.exp-avg-dtype = 8bit and optimizer.exp-avg-sq-dtype = bf16: moments are in 8 bits both or not";
    says!(mixed, said);
    let experts = contradiction(
        "[model]\npreset = \"mixtral-tiny\"\n[training]\ndtype = \"bf16\"\n[optimizer]\nmain-grads-dtype = \"bf16\"\n",
    );
    let said = "optimizer.main-grads-dtype = bf16 with training.dtype = bf16 and layers that are not dense: only gradients of dense layers";
    says!(experts, said);
    for part in [
        "optimizer.exp-avg-sq-dtype = bf16 with training.dtype = f64, whose states are f64; nearest legal: f32",
        "optimizer.main-params-dtype = bf16-remainder with training.dtype = f64: only bf16 weights have remainders",
    ] {
        says!(double, part);
    }
    for (keys, part) in [
        ("cpu-offload = true\noffload-fraction = 0", "optimizer.offload-fraction = 0 is not above 0 and at most 1"),
        ("offload-fraction = 0.5", "optimizer.offload-fraction = 0.5 without optimizer.cpu-offload"),
        (
            "[anomaly]\nspike = \"roll-back\"\n[checkpoint]\nevery = \"none\"",
            "roll-back needs checkpoints before the last step, and checkpoint.every = none; nearest legal: auto",
        ),
        ("[anomaly]\nroll-back-steps = 5", "anomaly.roll-back-steps = 5, and no bad step rolls back; nearest legal: 0"),
        (
            "[anomaly]\nspike = \"roll-back\"\nroll-back-steps = 25\n[checkpoint]\nevery = 10",
            "checkpoint.keep-last = 2 no checkpoint is that old; nearest legal: 20, or checkpoint.keep-last = 3",
        ),
        ("[anomaly]\nspike = \"skip\"\nwindow = 1", "anomaly.window = 1: one step has no standard deviation"),
        ("cpu-offload = true\n[training]\nema-decay = 0.999", "optimizer.cpu-offload = true with training.ema-decay"),
    ] {
        says!(contradiction(&format!("[optimizer]\n{keys}\n")), part);
    }
    says!(refusal("[optimizer]\nkind = \"sgd\"\ncpu-offload = true\n", &[]), "cpu-offload");
    assert!(contradiction("").contains("data.prefixes or data.text is needed, or chat.train"));
    let removed = refusal("", &[("performance.tune-products", "true")]);
    says!(removed, "performance.tune-products was removed: tuning GEMMs gained nothing");
    assert!(contradiction("[parallel]\nep = 2\ndp = 2\n").contains("expert-parallel 2: the model has no experts"));
    let ends = contradiction("[data]\nprefixes = [\"a\"]\nreset-attention-mask = true\nreset-position-ids = true\n");
    says!(ends, "data.reset-attention-mask needs", "data.reset-position-ids needs");
    let foreign = "[data]\nprefixes = [\"a\"]\neod-id = 50256\n";
    assert!(contradiction(foreign).contains("data.eod-id = 50256 is no token of model.vocab-size = 256"));
    let gpt = "[model]\npreset = \"gpt-tiny\"\nattention-dropout = 1.5\n";
    assert!(contradiction(gpt).contains("attention_dropout = 1.5 is not at least 0 and below 1"));
    let huge = contradiction("[data]\nprefixes = [\"a\"]\n[training]\nsteps = 9223372036854775807\nglobal-batch = 1\n");
    assert_eq!(
        huge,
        "training.steps = 9223372036854775807: their tokens are more than can be counted; nearest legal: 144115188075855871"
    );
    let divisor = contradiction("[model]\nmake-vocab-size-divisible-by = 0\n");
    says!(divisor, "make_vocab_size_divisible_by = 0 is not positive; nearest legal: 1");
    assert!(contradiction("[model]\nnum-key-value-heads = 3\n").contains("num_key_value_heads = 3 does not divide"));
}

#[test]
fn shares_that_nothing_is_divided_by_are_refused() {
    let said = |section: &str| {
        let data = "[data]\nsplit = \"80,10,10\"\ntokenizer = \"tokenizer.json\"\n";
        contradiction(&format!("{data}[{section}\ntrain = [\"a.jsonl\"]\n"))
    };
    for key in ["chat", "preference"] {
        let test = format!(
            "data.split = 80,10,10: {key}.train has no test data, whose share would be trained on; nearest legal: 90,10,0"
        );
        says!(said(&format!("{key}]")), &test);
        let apart = format!("data.split = 80,10,10 has no meaning with {key}.validation; nearest legal: leave it out");
        says!(said(&format!("{key}]\nvalidation = [\"b.jsonl\"]")), &apart);
    }
    says!(said("grpo]"), "data.split = 80,10,10 has no meaning with grpo.train");
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
