//! Keys that may differ between a run and the checkpoint that it resumes from.

use std::collections::BTreeMap;

use models::{FamilyConfig, ModelConfig};
use serde_json::Value;

use super::find::find;
use super::keys::KEYS;
use super::model::{ModelSection, kebab, size_names, snake, with};
use super::problem::{ConfigErrors, Problem, did_you_mean};
use super::resolve::unknown;
use super::run::RunConfig;
use super::sections::SECTIONS;

/// Sections that decide what a run learns; all others may change freely.
const GUARDED: &str =
    "model training fp8 lr optimizer param-groups weight-decay loss-scale data chat preference grpo distill lora";

/// Keys in these sections that do not. Some of them name weights that must be there if they were before.
const FREE: &str = "\
    distill.teacher distill.logits model.hf model.make-vocab-size-divisible-by training.steps training.micro-batch \
    training.exit-duration-in-mins training.exit-interval training.max-restarts training.min-data-parallel \
    training.distributed-timeout-minutes optimizer.cpu-offload optimizer.offload-fraction data.cache lora.adapter";

impl RunConfig {
    /// Whether this run may resume from a checkpoint whose run had the configuration `saved`: no key that decides what
    /// it learns has changed, except the keys or sections in `allowed`. A `saved` that is no configuration is ignored.
    ///
    /// # Errors
    /// Every key that has changed, with both values, and every name in `allowed` that is no key.
    pub fn check_changes(&self, saved: &Value, allowed: &[String]) -> Result<(), ConfigErrors> {
        let mut problems = Vec::new();
        let mut allow = Vec::new();
        for name in allowed {
            match known(name) {
                Some(name) => allow.push(name),
                None => problems.push(Problem::new(format!("--allow-change: {}", not_known(name)))),
            }
        }
        let is_allowed = |path: &str| {
            let covers = |name: &String| {
                path == name || path.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('.'))
            };
            allow.iter().any(covers)
        };
        let is_free = |path: &str| FREE.split(' ').any(|free| free == path);
        let now = guarded(&serde_json::to_value(self).expect("plain data"));
        for (path, before) in guarded(saved) {
            let Some(now) = now.get(&path) else { continue };
            let fits = || path.strip_prefix("model.").is_none_or(|size| has_weights(&saved["model"], size, now));
            let advice = match same(&before, now) {
                true => continue,
                false if !fits() => "give it the old value, the only one that the saved weights have".into(),
                false if is_allowed(&path) => continue,
                false if is_free(&path) && !self.is_lost(&path, [&before, now], saved) => continue,
                false => format!("give it the old value, or --allow-change {path}"),
            };
            problems.push(Problem::new(format!(
                "{path} was {} when the checkpoint was saved, now it is {}; {advice}",
                shown(&before),
                shown(now)
            )));
        }
        ConfigErrors::from_problems(problems)
    }

    /// Whether a run loses or gets weights that it reads whenever it begins; these may only move. `values` are those of
    /// the key before and now.
    fn is_lost(&self, path: &str, values: [&Value; 2], saved: &Value) -> bool {
        let was_given = |name: &str| !saved["distill"][name].is_null();
        match path {
            _ if values[0].is_null() == values[1].is_null() => false,
            // Each takes the place of the other.
            "distill.teacher" | "distill.logits" => {
                (was_given("teacher") || was_given("logits")) != self.distill.config().is_some()
            }
            _ => self.reads_again(path),
        }
    }
}

/// A key, a size or a section, in the spelling that paths have.
fn known(name: &str) -> Option<String> {
    let is_section = SECTIONS.iter().any(|(section, _)| *section == name);
    let size = name.strip_prefix("model.").map(kebab).filter(|size| size_names().contains(size));
    let key = find(name).map(|key| key.path.to_string());
    key.or(size.map(|size| format!("model.{size}"))).or(is_section.then(|| name.into()))
}

/// The message for a name that is none; sizes of models are no keys of their own.
fn not_known(name: &str) -> String {
    if !name.starts_with("model.") {
        return unknown(name);
    }
    let sizes = size_names().into_iter().map(|size| format!("model.{size}"));
    let paths: Vec<String> = sizes.chain(KEYS.iter().map(|key| key.path.into())).collect();
    format!("unknown key `{name}`{}", did_you_mean(name, paths.iter().map(String::as_str)))
}

/// Whether a model with another value of a size still has no weights but those of the `saved` one. What is no model is
/// refused elsewhere.
fn has_weights(saved: &Value, size: &str, now: &Value) -> bool {
    let Ok(ModelSection { config: saved, .. }) = serde_json::from_value(saved.clone()) else { return true };
    let Ok(now) = with(&saved, &snake(size), now.clone()) else { return size != "family" };
    if saved.check().is_err() || now.check().is_err() {
        return true;
    }
    let shapes = |config: &FamilyConfig| -> BTreeMap<String, Vec<usize>> {
        config.hf_names().iter().map(|(name, of)| (name.into(), of.our_shape())).collect()
    };
    let before = shapes(&saved);
    shapes(&now).iter().all(|(name, shape)| before.get(name) == Some(shape))
}

fn guarded(config: &Value) -> BTreeMap<String, Value> {
    let keys = |section: &'static str| {
        let keys = config.get(section).and_then(Value::as_object).into_iter().flatten();
        keys.map(move |(name, value)| (format!("{section}.{}", kebab(name)), value.clone()))
    };
    GUARDED.split(' ').flat_map(keys).collect()
}

/// Equal but for the last bits of a float, which JSON need not keep.
fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(x), Value::Number(y)) if x.is_f64() && y.is_f64() => {
            let (x, y) = (x.as_f64().unwrap_or_default(), y.as_f64().unwrap_or_default());
            (x - y).abs() <= 4.0 * f64::EPSILON * x.abs()
        }
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, value)| b.get(name).is_some_and(|other| same(value, other)))
        }
        _ => a == b,
    }
}

fn shown(value: &Value) -> String {
    if value.is_null() { super::kind::NONE.into() } else { value.to_string() }
}
