//! `[model]`: a Hugging Face folder, a preset or a family, and sizes on top.
//!
//! The sizes are the fields of the family's configuration (Hugging Face's names), in kebab-case or as they are.

use std::path::{Path, PathBuf};

use models::hf::parse_config;
use models::{FamilyConfig, ModelConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::keys::KEYS;
use super::kind::{Kind, NONE};
use super::layer::{Entry, Written};
use super::problem::{Problem, did_you_mean};
use crate::data::read_text;
use crate::refusal::{Access, advice, no_config};

/// The model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSection {
    /// Folder that initial weights are read from; without one they are random.
    pub hf: Option<PathBuf>,
    /// Sizes.
    #[serde(flatten)]
    pub config: FamilyConfig,
}

/// Every family, with the first of its presets.
fn families() -> Vec<FamilyConfig> {
    let mut families: Vec<FamilyConfig> = FamilyConfig::presets().into_iter().map(|(_, config)| config).collect();
    families.dedup_by_key(|config| config.family());
    families
}

/// The preset of a configuration that names no model.
const DEFAULT_PRESET: &str = "tiny";

/// The number of classes of a classifier, which `config.json` has by their names.
pub(super) const CLASSES: &str = "num_labels";

/// Names of published sizes of models that are plain Burn modules, and their `config.json`.
pub fn module_presets() -> impl Iterator<Item = (&'static str, Value)> {
    models::encoders::presets().into_iter().chain(models::images::presets())
}

/// Names of all sizes of all families, in kebab-case.
pub fn size_names() -> Vec<String> {
    const NO_SIZES: [&str; 4] = ["architectures", "model_type", "id2label", "label2id"];
    let of_families = FamilyConfig::sizes().into_iter().map(|(name, _)| name.to_string());
    let of_modules = module_presets().flat_map(|(_, config)| match config {
        Value::Object(sizes) => sizes.into_iter().map(|(name, _)| name).collect(),
        _ => Vec::new(),
    });
    let of_modules = of_modules.filter(|name| !NO_SIZES.contains(&name.as_str()));
    let all = of_families.chain(of_modules).chain([CLASSES.to_string()]);
    let mut names: Vec<String> = all.map(|name| kebab(&name)).collect();
    names.sort();
    names.dedup();
    names
}

/// A field's name as the file spells it.
pub(super) fn kebab(name: &str) -> String {
    name.replace('_', "-")
}

/// A size's name as its family's field has it.
pub(super) fn snake(name: &str) -> String {
    name.replace('-', "_")
}

/// The fields of a family's configuration, in their order.
pub(super) fn sizes(config: &FamilyConfig) -> Map<String, Value> {
    let Ok(Value::Object(mut fields)) = serde_json::to_value(config) else {
        unreachable!("a struct with named fields")
    };
    fields.remove("family");
    fields
}

/// The base of the sizes.
pub(super) enum Base {
    /// A folder.
    Hf(PathBuf),
    /// A preset.
    Preset(String),
    /// Nothing but the family: every size must be given.
    Family(String),
    /// Nothing at all.
    Default,
}

/// Sizes that follow from the rest of the configuration, used if nothing else gives them.
pub(super) struct Hints {
    /// Vocabulary size of the data.
    pub vocabulary: Option<usize>,
    /// Sequence length.
    pub seq_length: usize,
}

/// The base with the given sizes. `family` must agree with it.
pub(super) fn resolve(
    base: &Base,
    family: Option<&str>,
    entries: &[Entry],
    hints: &Hints,
) -> Result<FamilyConfig, Vec<Problem>> {
    let start = start(base).map_err(|problem| vec![problem])?;
    if let Some(family) = family.filter(|family| *family != start.family()) {
        let source = match base {
            Base::Hf(folder) => format!("model.hf {}", folder.display()),
            Base::Preset(name) => format!("model.preset {name}"),
            _ => format!("model.preset {DEFAULT_PRESET}, the default,"),
        };
        let what = format!("model.family = {family}, but {source} is {}", start.family());
        return Err(vec![Problem::new(what)]);
    }
    let mut problems = Vec::new();
    let (mut config, mut given) = (start.clone(), Vec::new());
    for entry in entries {
        match apply(&config, entry) {
            Ok((name, changed)) => {
                config = changed;
                given.push(name);
            }
            Err(problem) => problems.push(problem),
        }
    }
    let given = |name: &str| given.iter().any(|given| given == name);
    let mut rest = Map::new();
    if let Some(size) = hints.vocabulary.filter(|_| !given("vocab_size") && !matches!(base, Base::Hf(_))) {
        rest.insert("vocab_size".into(), size.into());
    }
    if matches!(base, Base::Family(_)) {
        complete(&start, &config, hints, &given, &mut rest, &mut problems);
    }
    for (name, value) in rest {
        config = with(&config, &name, value).expect("a size of the family");
    }
    if problems.is_empty() { Ok(config) } else { Err(problems) }
}

fn start(base: &Base) -> Result<FamilyConfig, Problem> {
    let preset =
        |name: &str| FamilyConfig::presets().into_iter().find(|(known, _)| *known == name).map(|(_, config)| config);
    match base {
        Base::Hf(folder) => hf_config(folder).map_err(|error| Problem::new(format!("model.hf: {error}"))),
        Base::Default => Ok(preset(DEFAULT_PRESET).expect("it is in the list")),
        Base::Preset(name) => preset(name).ok_or_else(|| {
            let names: Vec<&str> = FamilyConfig::presets().into_iter().map(|(name, _)| name).collect();
            if module_presets().any(|(known, _)| known == name) {
                let what = "is a plain Burn module, which `train` and `plan` take and this command does not; legal";
                return Problem::new(format!("model.preset = {name} {what}: {}", names.join(", ")));
            }
            let names: Vec<&str> = names.into_iter().chain(module_presets().map(|(name, _)| name)).collect();
            let guess = did_you_mean(name, names.iter().copied());
            Problem::new(format!("model.preset = {name} is not one of {}{guess}", names.join(", ")))
        }),
        Base::Family(name) => families().into_iter().find(|config| config.family() == name).ok_or_else(|| {
            let families = families();
            let names: Vec<&str> = families.iter().map(FamilyConfig::family).collect();
            let module = module_presets().find(|(_, config)| config["model_type"] == **name);
            let guess = match module {
                Some((preset, _)) => {
                    format!("; a plain Burn module has no family: model.preset = {preset}, or model.hf")
                }
                None => did_you_mean(name, names.iter().copied()),
            };
            Problem::new(format!("model.family = {name} is not one of {}{guess}", names.join(", ")))
        }),
    }
}

/// The model's sizes by a folder's `config.json`.
pub(super) fn hf_config(folder: &Path) -> Result<FamilyConfig, String> {
    let path = folder.join("config.json");
    if !path.exists() {
        return Err(no_config(folder));
    }
    let named = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let text = read_text(&path).map_err(|error| format!("{}{}", named(&error), advice(Access::Read, &error)))?;
    let json: Value = parse_config(text.as_bytes()).map_err(|error| named(&error))?;
    FamilyConfig::from_hf(&json).map_err(|error| named(&error.to_string().trim_start_matches("config.json: ")))
}

/// Sizes that Megatron-LM calls by other names, without dashes before them, and their keys.
const MEGATRON: [(&str, &str); 9] = [
    ("num-layers", "num-hidden-layers"),
    ("ffn-hidden-size", "intermediate-size"),
    ("num-query-groups", "num-key-value-heads"),
    ("group-query-attention", "num-key-value-heads"),
    ("kv-channels", "head-dim"),
    ("moe-router-topk", "num-experts-per-tok"),
    ("moe-ffn-hidden-size", "moe-intermediate-size"),
    ("mamba-state-dim", "ssm-state-size"),
    ("mamba-num-groups", "n-groups"),
];

/// The size of `[model]` that Megatron-LM calls so.
pub fn of_megatron(name: &str) -> Option<&'static str> {
    MEGATRON.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours)
}

/// One size changed; also its field's name.
fn apply(config: &FamilyConfig, entry: &Entry) -> Result<(String, FamilyConfig), Problem> {
    let problem = |what: String| Problem { origin: entry.origin.clone(), what };
    let fields = sizes(config);
    let name = snake(entry.path.trim_start_matches("model."));
    let Some(old) = fields.get(&name) else {
        let sizes = fields.keys().map(|name| format!("model.{}", kebab(name)));
        let paths: Vec<String> = sizes.chain(KEYS.iter().map(|key| key.path.into())).collect();
        let same = of_megatron(&kebab(&name)).filter(|ours| fields.contains_key(&snake(ours)));
        let guess = same.map_or_else(
            || did_you_mean(&entry.path, paths.iter().map(String::as_str)),
            |ours| format!("; did you mean `model.{ours}`?"),
        );
        return Err(problem(format!("unknown key `{}` for family {}{guess}", entry.path, config.family())));
    };
    if let (true, Ok(changed)) = (entry.value.is(NONE), with(config, &name, Value::Null)) {
        return Ok((name, changed));
    }
    let kind = match old {
        Value::Bool(_) => Some(Kind::Flag),
        Value::Number(number) if number.is_u64() => Some(Kind::Whole),
        Value::Number(_) => Some(Kind::Number),
        Value::String(_) => Some(Kind::Text),
        _ => None,
    };
    let refuse = |why: &str| problem(format!("{} = {} is not {why}", entry.path, entry.value));
    let value = match kind {
        Some(kind) => kind.take(&entry.value).ok_or_else(|| refuse(&kind.legal()))?,
        None => free(&entry.value),
    };
    let changed = with(config, &name, value).map_err(|error| refuse(&format!("a value of this key: {error}")))?;
    Ok((name, changed))
}

/// A configuration with another value of a field.
pub(super) fn with(config: &FamilyConfig, name: &str, value: Value) -> Result<FamilyConfig, serde_json::Error> {
    let mut fields = serde_json::to_value(config)?;
    fields[name] = value;
    serde_json::from_value(fields)
}

/// A value of a key that may be left out or has parts.
pub(super) fn free(written: &Written) -> Value {
    let value = match written {
        Written::Toml(value) => value.clone(),
        Written::Text(text) => {
            let parsed = format!("value = {text}").parse::<toml::Table>().ok();
            parsed.and_then(|mut table| table.remove("value")).unwrap_or_else(|| text.clone().into())
        }
    };
    match value.as_str() {
        Some(NONE) => Value::Null,
        _ => snake_keys(serde_json::to_value(value).unwrap_or(Value::Null)),
    }
}

fn snake_keys(value: Value) -> Value {
    match value {
        Value::Object(fields) => fields.into_iter().map(|(name, value)| (snake(&name), snake_keys(value))).collect(),
        other => other,
    }
}

/// If only the family is known: sizes that follow from others, and a problem for each that is missing.
fn complete(
    start: &FamilyConfig,
    config: &FamilyConfig,
    hints: &Hints,
    given: &dyn Fn(&str) -> bool,
    rest: &mut Map<String, Value>,
    problems: &mut Vec<Problem>,
) {
    let fields = sizes(config);
    let size = |name: &str| fields.get(name).and_then(Value::as_u64).unwrap_or(0);
    let heads = size("num_attention_heads");
    for (name, value) in sizes(start) {
        if given(&name) || rest.contains_key(&name) || !start.is_needed(&name, &value) {
            continue;
        }
        match name.as_str() {
            "max_position_embeddings" => drop(rest.insert(name, hints.seq_length.into())),
            "num_key_value_heads" => drop(rest.insert(name, heads.into())),
            "head_dim" => drop(rest.insert(name, (size("hidden_size") / heads.max(1)).into())),
            _ => {
                let what = format!("model.{} is missing: a family has no sizes of its own, presets have", kebab(&name));
                problems.push(Problem::new(what));
            }
        }
    }
}
