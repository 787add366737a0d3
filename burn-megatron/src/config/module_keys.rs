//! Keys and values that have a meaning for models that are plain Burn modules.

use serde_json::Value;

/// Keys that have a meaning for these models.
const TAKEN: &str = "model.hf model.preset parallel.tensor-parallel parallel.sequence-parallel parallel.pipeline-parallel \
    parallel.virtual-pipeline parallel.data-parallel parallel.zero pipeline.schedule training.steps training.samples \
    training.tokens training.micro-batch training.global-batch training.seq-length training.seed training.dtype training.loss \
    training.clip lr.max lr.min lr.init lr.warmup lr.decay lr.form optimizer.kind optimizer.beta1 optimizer.beta2 optimizer.eps \
    optimizer.weight-decay optimizer.decay-vectors param-groups.frozen data.prefixes data.tokenizer data.split data.seed masked.mask-prob \
    masked.short-seq-prob masked.decoder-seq-length masked.vocab-extra-ids images.train images.validation images.processor images.template \
    images.skip-bad-rows lora.rank lora.alpha lora.target-modules lora.rslora lora.dora \
    lora.rank-pattern lora.alpha-pattern lora.adapter evaluation.every evaluation.batches \
    checkpoint.directory checkpoint.every checkpoint.keep-last checkpoint.resume output.directory log.jsonl log.tensorboard \
    log.wandb log.mlflow";

/// What is taken of a key, and what a value of it that is not taken would have to be.
pub(super) type Legal = (&'static str, fn(&Value) -> bool, &'static str);

/// Keys of which not every value has a meaning.
pub(super) const LIMITS: [Legal; 5] = [
    ("training.dtype", |value| value != "f16", "f32, f64, bf16"),
    ("training.loss", |value| value == "per-micro-batch", "per-micro-batch"),
    ("optimizer.kind", |value| value == "adamw", "adamw"),
    (
        "pipeline.schedule",
        |value| ["gpipe", "1f1b", "interleaved"].iter().any(|kind| value == kind) || value.is_null(),
        "gpipe, 1f1b, interleaved, none",
    ),
    ("checkpoint.resume", |value| ["if-present", "never"].iter().any(|word| value == word), "if-present, never"),
];

/// Whether a key has a meaning for a model of this family.
pub(super) fn is_taken(path: &str, kind: &str) -> bool {
    of_kinds(path).contains(&kind) && TAKEN.split_whitespace().any(|taken| taken == path)
}

/// The families for which a key may have a meaning.
pub(super) fn of_kinds(path: &str) -> &'static [&'static str] {
    match path {
        "images.template" => &["llava"],
        "data.tokenizer" | "training.seq-length" | "training.tokens" => &["bert", "t5", "llava"],
        "data.prefixes" => &["bert", "t5"],
        path if path.starts_with("masked.") => &["bert", "t5"],
        path if path.starts_with("images.") => &["vit", "llava"],
        _ => &["bert", "t5", "vit", "llava"],
    }
}
