//! Keys that have a meaning only with some values of another key: those of an optimizer, of a kind of recomputation, of
//! fp16 and FP8, and a few others.

use serde_json::Value;

use super::keys::KEYS;
use super::kind::{Kind, NONE};
use crate::optim::OptimizerConfig;

/// The key that decides whether a key means something.
pub(super) fn decider(path: &str) -> Option<&'static str> {
    let single = match path {
        "context.max-tokens-per-rank" => Some("context.dynamic"),
        "context.hierarchical-sizes" => Some("context.comm-type"),
        "evaluation.ema" => Some("training.ema-decay"),
        "data.bpe-size" => Some("data.tokenizer"),
        "anomaly.sigma-factor" | "anomaly.window" => Some("anomaly.spike"),
        "checkpoint.storage" | "checkpoint.every" | "checkpoint.keep-last" | "checkpoint.keep-every" => Some(FOLDER),
        "checkpoint.async" | "checkpoint.pinned-memory" => Some(FOLDER),
        "fp8.amax-history-len" | "fp8.amax-compute-algo" | "fp8.margin" => Some("fp8.recipe"),
        "preference.label-smoothing" | "preference.gamma" => Some("preference.loss"),
        "preference.desirable-weight" | "preference.undesirable-weight" => Some("preference.loss"),
        "weight-decay.start" | "weight-decay.length" => Some("weight-decay.incr-style"),
        "fp8.num-layers-at-start-in-bf16" | "fp8.num-layers-at-end-in-bf16" => Some("fp8.first-last-layers-bf16"),
        _ => None,
    };
    let of_section = || match path.split_once('.')?.0 {
        "optimizer" => Some("optimizer.kind"),
        "recompute" => Some("recompute.granularity"),
        "loss-scale" => Some("training.dtype"),
        "fp8" => Some("fp8.format"),
        "lora" => Some("lora.rank"),
        "chat" => Some("chat.train"),
        "preference" => Some("preference.train"),
        "grpo" => Some("grpo.train"),
        "distill" if path != "distill.logits" => Some(TEACHER),
        _ => None,
    };
    single.or_else(of_section).filter(|decider| *decider != path)
}

const TEACHER: &str = "distill.teacher";
const FOLDER: &str = "checkpoint.directory";

/// The value of a decider in words. A file of its logits takes the place of a teacher.
pub(super) fn decided(decider: &str, value: impl Fn(&str) -> String) -> String {
    match value(decider) {
        none if none == NONE && decider == TEACHER => value("distill.logits"),
        word => word,
    }
}

/// A decider's value in words, as [`belongs`] takes it.
pub(super) fn words(value: &Value) -> String {
    match value {
        Value::Null => NONE.into(),
        Value::String(word) => word.clone(),
        Value::Array(list) => list.iter().map(words).collect::<Vec<_>>().join(", "),
        value => value.to_string(),
    }
}

/// Whether a key means something if its decider has this value.
pub(super) fn belongs(path: &str, decided: &str) -> bool {
    let (section, name) = path.split_once('.').unwrap_or_default();
    match (section, name) {
        ("optimizer", "kind") | ("recompute", "granularity") | ("fp8", "format") => true,
        ("lora", "rank") | ("chat" | "preference" | "grpo", "train") | ("distill", "teacher" | "logits") => true,
        ("preference", "label-smoothing") => ["dpo", "simpo"].contains(&decided),
        ("preference", "gamma") => decided == "simpo",
        ("preference", "desirable-weight" | "undesirable-weight") => decided == "kto",
        ("optimizer", name) => defaults(decided).get(name).is_some(),
        ("recompute", "modules") => decided == "selective",
        ("recompute", _) => decided == "full",
        ("loss-scale", _) => decided == "f16",
        ("evaluation", "ema") => decided != NONE,
        ("context", "max-tokens-per-rank") => decided == "true",
        ("context", "hierarchical-sizes") => decided.contains("a2a+p2p"),
        // Without a text its tokenizer is not known yet.
        ("data", "bpe-size") => ["bpe", NONE].contains(&decided),
        ("weight-decay", "start" | "length") => decided != "constant",
        ("fp8", "amax-history-len" | "amax-compute-algo") => decided == "delayed",
        ("fp8", "margin") => decided != "blockwise",
        ("fp8", "num-layers-at-start-in-bf16" | "num-layers-at-end-in-bf16") => decided == "true",
        ("anomaly", "sigma-factor" | "window") => decided != NONE,
        ("checkpoint", name) if name != "directory" => decided != NONE,
        ("fp8" | "lora" | "distill", _) => decided != NONE,
        // A list of files.
        ("chat" | "preference" | "grpo", _) => !decided.is_empty(),
        _ => true,
    }
}

/// The constants of a kind of optimizer.
pub(super) fn defaults(kind: &str) -> Value {
    let config = serde_json::from_value::<OptimizerConfig>(serde_json::json!({ "kind": kind }));
    config.ok().and_then(|config| serde_json::to_value(config).ok()).unwrap_or_default()
}

/// The values of the decider with which the key means something.
pub(super) fn owners(path: &str) -> String {
    let decider = KEYS.iter().find(|key| Some(key.path) == decider(path));
    let words: &[&str] = match decider.map(|key| key.kind) {
        Some(Kind::Choice(words)) => words,
        Some(Kind::CommTypes) => &["a2a+p2p"],
        Some(Kind::Flag) => &["true"],
        Some(Kind::Count | Kind::Number) => &["a number"],
        Some(Kind::Paths) => &["files"],
        Some(Kind::Path) => &["a folder"],
        _ => &["bpe"],
    };
    words.iter().filter(|word| belongs(path, word)).copied().collect::<Vec<_>>().join(", ")
}
