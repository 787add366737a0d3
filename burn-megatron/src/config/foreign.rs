//! Keys that only some values of another key have: each optimizer's own, those of a kind of recomputation, those of fp16 and
//! of FP8.

use serde_json::Value;

use super::keys::KEYS;
use crate::optim::OptimizerConfig;

/// The key that decides which keys of a section there are.
pub(super) fn decider(path: &str) -> Option<&'static str> {
    match path.split_once('.')?.0 {
        "optimizer" => Some("optimizer.kind"),
        "recompute" => Some("recompute.granularity"),
        "loss-scale" => Some("training.dtype"),
        "fp8" => Some("fp8.format"),
        _ => None,
    }
    .filter(|decider| *decider != path)
}

/// Whether a key means something if its decider has this value.
pub(super) fn belongs(path: &str, decided: &str) -> bool {
    let (section, name) = path.split_once('.').unwrap_or_default();
    match (section, name) {
        ("optimizer", "kind") | ("recompute", "granularity") | ("fp8", "format") => true,
        ("optimizer", name) => defaults(decided).get(name).is_some(),
        ("recompute", "modules") => decided == "selective",
        ("recompute", _) => decided == "full",
        ("loss-scale", _) => decided == "f16",
        ("fp8", _) => decided != "none",
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
    let words = match decider.map(|key| key.kind) {
        Some(super::Kind::Choice(words)) => words,
        _ => &[],
    };
    words.iter().filter(|word| belongs(path, word)).copied().collect::<Vec<_>>().join(", ")
}
