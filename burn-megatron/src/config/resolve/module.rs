//! Runs of models that are plain Burn modules: the same file, in which fewer keys have a meaning.

use std::path::Path;

use models::hf::{HfModule, parse_config};
use models::images::{Llava, Vit, set_classes};
use models::{Bert, T5};
use serde_json::{Map, Value};

use super::{ANY_SIZE, Base, Values};
use crate::config::keys::KEYS;
use crate::config::layer::read_text;
use crate::config::model::{CLASSES, free, kebab, module_presets, snake};
use crate::config::module::{ModuleConfig, ModuleModel};
use crate::config::module_keys::{LIMITS, is_taken, of_kinds};
use crate::config::problem::{ConfigErrors, Problem, did_you_mean};
use crate::config::sections::is_of_modules;
use crate::config::world::WorldSize;
use crate::engine::LossMean;

/// Families that a file can train.
const FAMILIES: [&str; 4] = ["bert", "t5", "vit", "llava"];

/// Most classes of an image: a head of more is a mistake.
const MOST_CLASSES: u64 = 1 << 20;

impl ModuleConfig {
    /// As [`RunConfig::load_on`](crate::config::RunConfig::load_on); `None` if the model is no BERT, T5, ViT or LLaVA.
    ///
    /// # Errors
    /// Everything that is wrong with keys and values.
    pub fn load_on(
        file: Option<&Path>,
        overrides: &[(String, String)],
        world: WorldSize<'_>,
    ) -> Result<Option<Self>, ConfigErrors> {
        let (name, text) = read_text(file).map_err(|problem| ConfigErrors(vec![problem]))?;
        Values::of(&name, &text, overrides).finish_module(world)
    }

    /// The same of a text that is called `name`, where the number of ranks is not known.
    ///
    /// # Errors
    /// As [`load_on`](Self::load_on).
    pub fn parse(name: &str, text: &str, overrides: &[(String, String)]) -> Result<Option<Self>, ConfigErrors> {
        Values::of(name, text, overrides).finish_module(&super::unknown_world)
    }
}

impl Values {
    /// Refuses what only other models have.
    pub(super) fn refuse_sections_of_modules(&mut self) {
        let is_one = |path: &&'static str| path.split('.').next().is_some_and(is_of_modules);
        for path in self.given.keys().filter(|path| is_one(path)) {
            let kinds = of_kinds(path).join(", ");
            let what = format!("{path} = {} has no meaning with this model; only with {kinds}", self.values[path]);
            self.problems.push(Problem { origin: self.given[path].clone(), what });
        }
    }

    /// The `config.json` of folder or preset, if it is of a family that a file can train.
    fn module(&self) -> Option<Value> {
        let config = match &self.base {
            Base::Hf(folder) => {
                parse_config(crate::data::read_text(&folder.join("config.json")).ok()?.as_bytes()).ok()?
            }
            Base::Preset(name) => module_presets().find(|(known, _)| known == name)?.1,
            _ => return None,
        };
        config["model_type"].as_str().filter(|kind| FAMILIES.contains(kind))?;
        Some(config)
    }

    fn finish_module(mut self, world: WorldSize<'_>) -> Result<Option<ModuleConfig>, ConfigErrors> {
        let Some(mut config) = self.module() else { return Ok(None) };
        let kind = config["model_type"].as_str().unwrap_or_default().to_string();
        let mut sizes = Map::new();
        for entry in std::mem::take(&mut self.sizes) {
            let name = snake(entry.path.trim_start_matches("model."));
            let given = free(&entry.value);
            if name == CLASSES && kind == "vit" {
                match given.as_u64().filter(|classes| (2..=MOST_CLASSES).contains(classes)) {
                    Some(classes) => {
                        set_classes(&mut config, classes as usize);
                        // Of a model without a head, too, which gets one.
                        config["architectures"] = serde_json::json!(["ViTForImageClassification"]);
                    }
                    None => {
                        let what = format!("{} = {given}; legal: 2 to {MOST_CLASSES} classes", entry.path);
                        self.problems.push(Problem { origin: entry.origin, what });
                        continue;
                    }
                }
                sizes.insert(name, given);
                continue;
            }
            if config.get(&name).is_none() {
                let known: Vec<String> = config
                    .as_object()
                    .into_iter()
                    .flatten()
                    .map(|(name, _)| format!("model.{}", kebab(name)))
                    .collect();
                let guess = did_you_mean(&entry.path, known.iter().map(String::as_str));
                let what = format!("unknown key `{}` for family {kind}{guess}", entry.path);
                self.problems.push(Problem { origin: entry.origin, what });
                continue;
            }
            overlay(&mut config[&name], given.clone());
            sizes.insert(name, given);
        }
        let refused = match kind.as_str() {
            "bert" => match Bert::from_hf(&config) {
                Ok(sizes) => {
                    if !sizes.predictions {
                        let what = "model.hf: a BertModel has no head that predicts masked tokens; nearest legal: a folder of \
                                    BertForMaskedLM or BertForPreTraining";
                        self.problems.push(Problem::new(what));
                    }
                    None
                }
                Err(error) => Some(error),
            },
            "vit" => match Vit::from_hf(&config) {
                Ok(sizes) => {
                    if sizes.num_labels.is_none() {
                        let what = "model.hf: a ViTModel has no head that tells classes; nearest legal: model.num-labels = 2, or as \
                                    many classes as a new head is to have";
                        self.problems.push(Problem::new(what));
                    }
                    None
                }
                Err(error) => Some(error),
            },
            "llava" => Llava::from_hf(&config).err(),
            _ => T5::from_hf(&config).err(),
        };
        self.problems.extend(refused.map(|error| Problem::new(format!("model: {error}"))));
        self.refuse_others(&kind);
        if self.text("parallel.data-parallel").as_deref() == Some(ANY_SIZE) {
            let sizes = ["tensor-parallel", "pipeline-parallel"].map(|key| self.number(&format!("parallel.{key}")));
            let copy = sizes.iter().product::<u64>().max(1) as usize;
            let ranks = world(copy).unwrap_or_else(|what| {
                self.problems.push(Problem::new(format!("parallel.data-parallel = auto: {what}")));
                copy
            });
            self.values.insert("parallel.data-parallel", (ranks / copy).max(1).into());
        }
        ConfigErrors::from_problems(std::mem::take(&mut self.problems))?;
        self.values.insert("training.loss", serde_json::to_value(LossMean::PerMicroBatch).unwrap_or_default());
        let config = self.sections(config, sizes)?;
        let problems = config.problems();
        ConfigErrors::from_problems(problems)?;
        Ok(Some(config))
    }

    /// Refuses keys and values that these models do not have.
    fn refuse_others(&mut self, kind: &str) {
        for (path, origin) in &self.given {
            // What another key leaves without meaning was refused by then.
            let Some(value) = self.values.get(path) else { continue };
            let key = KEYS.iter().find(|key| key.path == *path);
            let default = key.filter(|key| !key.default.is_empty()).map(|key| key.default_value());
            let limit = LIMITS.iter().find(|(limited, takes, _)| limited == path && !takes(value));
            let what = match limit {
                _ if !is_taken(path, kind) && Some(value) != default.as_ref() => {
                    let nearest = default.map_or_else(|| "without it".to_string(), |default| shown(&default));
                    format!(
                        "{path} = {} has no meaning with {kind}, a plain Burn module; nearest legal: {nearest}",
                        shown(value)
                    )
                }
                Some((_, _, legal)) => format!("{path} = {} is not for {kind}; legal: {legal}", shown(value)),
                None => continue,
            };
            self.problems.push(Problem { origin: origin.clone(), what });
        }
    }

    fn sections(mut self, config: Value, sizes: Map<String, Value>) -> Result<ModuleConfig, ConfigErrors> {
        self.values.remove("optimizer.kind");
        let mut sections = Map::new();
        for (path, value) in self.values {
            let (section, name) = path.split_once('.').expect("paths have sections");
            let section = sections.entry(section).or_insert_with(|| Value::Object(Map::new()));
            section[name] = value;
        }
        let (hf, preset) = match self.base {
            Base::Hf(folder) => (Some(folder), None),
            Base::Preset(name) => (None, Some(name)),
            _ => (None, None),
        };
        let model = ModuleModel { hf, preset, sizes, config };
        sections.insert("model".into(), serde_json::to_value(model).expect("plain data"));
        let read = serde_json::from_value(Value::Object(sections));
        read.map_err(|error| ConfigErrors(vec![Problem::new(error)]))
    }
}

/// Puts a size over another one; of an object, as of a LLaVA's parts, only what is given.
fn overlay(size: &mut Value, given: Value) {
    match (size, given) {
        (Value::Object(sizes), Value::Object(given)) => {
            for (name, given) in given {
                overlay(sizes.entry(name).or_insert(Value::Null), given);
            }
        }
        (size, given) => *size = given,
    }
}

/// A value in words.
fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".into(),
        Value::String(word) => word.clone(),
        other => other.to_string(),
    }
}
