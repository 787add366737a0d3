//! One configuration from defaults, file and command line; each overrides the one before it.

mod length;
mod module;
mod unknown;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::decoder::decoder_of;
use super::find::find;
use super::foreign::{belongs, decided, decider, defaults, owners, words};
use super::keys::KEYS;
use super::kind::{AUTO as ANY_SIZE, NONE};
use super::layer::{Entry, read_file, read_overrides, read_text};
use super::model::{self, Base, Hints};
use super::problem::{ConfigErrors, Origin, Problem};
use super::run::RunConfig;
use super::sections::{SECTIONS, is_of_modules};
use super::world::{WorldSize, unknown as unknown_world};
use crate::data::{find_tokenizer, readable_tokenizer};
use crate::schedule::AUTO;
pub(super) use unknown::unknown;

impl RunConfig {
    /// Reads a TOML file, or takes the defaults where there is none, with `--section.key value` pairs on top.
    ///
    /// # Errors
    /// Everything that is wrong with keys and values. [`RunConfig::check`] says whether they fit together.
    pub fn load(file: Option<&Path>, overrides: &[(String, String)]) -> Result<Self, ConfigErrors> {
        Self::load_on(file, overrides, &unknown_world)
    }

    /// As [`RunConfig::load`], where the number of ranks is known, from which `parallel.data-parallel = "auto"`
    /// follows. Fails as [`RunConfig::load`]; or if the global batch cannot be shared out over so many ranks.
    pub fn load_on(
        file: Option<&Path>,
        overrides: &[(String, String)],
        world: WorldSize<'_>,
    ) -> Result<Self, ConfigErrors> {
        let (name, text) = read_text(file).map_err(|problem| ConfigErrors(vec![problem]))?;
        Self::parse_on(&name, &text, overrides, world)
    }

    /// As [`RunConfig::load`], of a text; `name` is what messages call it, and runs without an output folder are named
    /// after it.
    pub fn parse(name: &str, text: &str, overrides: &[(String, String)]) -> Result<Self, ConfigErrors> {
        Self::parse_on(name, text, overrides, &unknown_world)
    }

    /// As [`RunConfig::parse`], with the number of ranks.
    pub(super) fn parse_on(
        name: &str,
        text: &str,
        overrides: &[(String, String)],
        world: WorldSize<'_>,
    ) -> Result<Self, ConfigErrors> {
        Values::of(name, text, overrides).finish(world)
    }
}

/// Values by path, while they are collected.
struct Values {
    values: BTreeMap<&'static str, Value>,
    /// Where keys were written last.
    given: BTreeMap<&'static str, Origin>,
    sizes: Vec<Entry>,
    base: Base,
    problems: Vec<Problem>,
}

impl Values {
    /// Of a file called `name` and a command line.
    fn of(name: &str, text: &str, overrides: &[(String, String)]) -> Self {
        let mut values = Self::defaults();
        match read_file(name, text) {
            Ok(entries) => values.layer(entries),
            Err(problem) => values.problems.push(problem),
        }
        values.layer(read_overrides(overrides));
        let stem = Path::new(name).file_stem().unwrap_or_default();
        values.derive(&Path::new("runs").join(stem));
        values
    }

    fn defaults() -> Self {
        let with_default = KEYS.iter().filter(|key| !key.default.is_empty());
        let values = with_default.map(|key| (key.path, key.default_value())).collect();
        Self { values, given: BTreeMap::new(), sizes: Vec::new(), base: Base::Default, problems: Vec::new() }
    }

    fn layer(&mut self, entries: Vec<Entry>) {
        let mut seen: BTreeMap<&str, String> = BTreeMap::new();
        for entry in entries {
            let problem = |what: String| Problem { origin: entry.origin.clone(), what };
            let Some(key) = find(&entry.path) else {
                let is_section = SECTIONS.iter().any(|(section, _)| *section == entry.path);
                match entry.path.starts_with("model.") {
                    true => self.sizes.push(entry),
                    false if is_section && entry.value.is_empty_table() => {}
                    false => self.problems.push(problem(unknown(&entry.path))),
                }
                continue;
            };
            let earlier = seen.insert(key.path, entry.path.clone());
            if let Some(earlier) = earlier.filter(|_| entry.origin != Origin::CommandLine) {
                self.problems.push(problem(format!("`{}` and `{earlier}` are the same key", entry.path)));
                continue;
            }
            let none = key.optional && entry.value.is(NONE);
            match if none { Some(Value::Null) } else { key.kind.take(&entry.value) } {
                Some(value) => {
                    self.values.insert(key.path, value);
                    self.given.insert(key.path, entry.origin.clone());
                }
                None => {
                    let legal = key.legal() + entry.value.limit() + &key.kind.guess(&entry.value);
                    self.problems.push(problem(format!("{} = {} is not {legal}", entry.path, entry.value)));
                }
            }
        }
        self.choose_base(&seen);
    }

    /// A later layer that names a folder, a preset or a family replaces the one of an earlier layer.
    fn choose_base(&mut self, seen: &BTreeMap<&str, String>) {
        let named = |path| seen.contains_key(path).then(|| self.text(path)).flatten();
        let taken_back = |path| seen.contains_key(path) && self.text(path).is_none();
        let base = match (named("model.hf"), named("model.preset")) {
            (Some(folder), Some(preset)) => {
                let what = format!("model.hf = {folder} and model.preset = {preset}: only one can be the model");
                self.problems.push(Problem::new(what));
                return;
            }
            (Some(folder), None) => Some(Base::Hf(folder.into())),
            (None, Some(preset)) => Some(Base::Preset(preset)),
            (None, None) => match &self.base {
                Base::Hf(_) if !taken_back("model.hf") => None,
                Base::Preset(_) if !taken_back("model.preset") => None,
                _ => Some(self.text("model.family").map_or(Base::Default, Base::Family)),
            },
        };
        self.base = base.unwrap_or_else(|| std::mem::replace(&mut self.base, Base::Default));
    }

    fn text(&self, path: &str) -> Option<String> {
        self.values.get(path).and_then(Value::as_str).map(String::from)
    }

    fn number(&self, path: &str) -> u64 {
        self.values.get(path).and_then(Value::as_u64).unwrap_or_default()
    }

    fn files(&self, path: &str) -> usize {
        self.values.get(path).and_then(Value::as_array).map_or(0, Vec::len)
    }

    /// Derives the values that no layer gives from other keys.
    fn derive(&mut self, directory: &Path) {
        self.fill("data.tokenizer", self.default_tokenizer());
        self.settle_length();
        if self.files("grpo.train") > 0 {
            // Its numbers are those of every step.
            for key in ["evaluation.batches", "evaluation.final-batches"] {
                if !self.given.contains_key(key) {
                    self.values.insert(key, 0.into());
                }
            }
        }
        self.fill("output.directory", directory.display().to_string().into());
        let output = PathBuf::from(self.text("output.directory").unwrap_or_default());
        self.fill("checkpoint.directory", output.join("checkpoints").display().to_string().into());
        self.sort_out();
        let steps = self.number("training.steps");
        // TOML's integers have 63 bits.
        let samples = self.batch_sizes().samples(steps).min(i64::MAX as u64);
        let documents = if self.files("data.text") == 1 { "paragraph" } else { "file" };
        self.fill("lr.decay", format!("{steps} steps").into());
        if self.text("weight-decay.incr-style").as_deref() != Some("constant")
            && self.values["weight-decay.length"].is_null()
        {
            self.values.insert("weight-decay.length", format!("{steps} steps").into());
        }
        self.fill("data.text-documents", documents.into());
        let apart = self.files("data.validation") + self.files("data.test") > 0;
        self.fill("data.split", if apart { "1,0,0" } else { "95,5,0" }.into());
        self.fill("data.samples", samples.into());
        // Megatron's generator of sample orders takes 32 bits.
        self.fill("data.seed", (self.number("training.seed") as u32).into());
        self.fill("evaluation.every", steps.div_ceil(10).into());
    }

    /// Refuses keys that another key's value leaves without meaning. A key of the file is dropped silently if the
    /// command line has changed that other key, and `none` is always accepted. The optimizer's other keys get the
    /// defaults of its kind.
    fn sort_out(&mut self) {
        let given = std::mem::take(&mut self.given);
        for (&path, origin) in &given {
            let Some(decider) = decider(path) else { continue };
            let decided = decided(decider, |path| self.values.get(path).map_or_else(|| NONE.into(), words));
            if belongs(path, &decided) {
                continue;
            }
            let value = self.values.remove(path).unwrap_or_default();
            if let Some(key) = find(path).filter(|key| !key.default.is_empty()) {
                self.values.insert(path, key.default_value());
            }
            let mut above = std::iter::successors(Some(decider), |path| super::foreign::decider(path));
            let gives_way =
                *origin != Origin::CommandLine && above.any(|path| given.get(path) == Some(&Origin::CommandLine));
            if gives_way || value.is_null() {
                continue;
            }
            let what =
                format!("{path} = {value} has no meaning with {decider} = {decided}; only with {}", owners(path));
            self.problems.push(Problem { origin: origin.clone(), what });
        }
        self.given = given;
        let kind = self.text("optimizer.kind").unwrap_or_default();
        for (name, value) in defaults(&kind).as_object().into_iter().flatten() {
            if let Some(key) = find(&format!("optimizer.{name}")) {
                self.fill(key.path, value.clone());
            }
        }
    }

    fn fill(&mut self, path: &'static str, value: Value) {
        self.values.entry(path).or_insert(value);
    }

    fn default_tokenizer(&self) -> Value {
        let of_folder = match &self.base {
            // What is tokenized already needs none.
            Base::Hf(folder) if self.files("data.prefixes") > 0 => readable_tokenizer(folder).unwrap_or_default(),
            Base::Hf(folder) => find_tokenizer(folder),
            _ => None,
        };
        match of_folder {
            Some(path) => path.display().to_string().into(),
            None if self.files("data.text") > 0 => "bpe".into(),
            None => Value::Null,
        }
    }

    /// Vocabulary size of a tokenizer that is made from the text, if it is known before the text is read.
    fn vocabulary(&self) -> Option<usize> {
        match self.text("data.tokenizer").as_deref() {
            Some("bpe") => Some(self.number("data.bpe-size") as usize),
            // The bytes and the end-of-document token.
            Some("byte") => Some(257),
            _ => None,
        }
    }

    fn finish(mut self, world: WorldSize<'_>) -> Result<RunConfig, ConfigErrors> {
        let fills_world = self.text("parallel.data-parallel").as_deref() == Some(ANY_SIZE);
        if fills_world {
            self.values.insert("parallel.data-parallel", 1.into());
        }
        self.refuse_sections_of_modules();
        let family = self.text("model.family");
        let seq_length = self.number("training.seq-length") as usize;
        let hints = Hints { vocabulary: self.vocabulary(), seq_length };
        let config = match model::resolve(&self.base, family.as_deref(), &self.sizes, &hints) {
            Ok(config) => Some(config),
            Err(problems) => {
                self.problems.extend(problems);
                None
            }
        };
        ConfigErrors::from_problems(self.problems)?;
        let mut sections: Map<String, Value> =
            SECTIONS.iter().map(|(name, _)| (name.to_string(), Value::Object(Map::new()))).collect();
        for (path, value) in &self.values {
            let (section, name) = path.split_once('.').expect("paths have sections");
            sections[section][name] = value.clone();
        }
        let mut model = serde_json::to_value(config).unwrap_or_default();
        model["hf"] = match self.base {
            Base::Hf(folder) => folder.display().to_string().into(),
            _ => Value::Null,
        };
        sections["model"] = model;
        sections.retain(|section, _| !is_of_modules(section));
        let config = serde_json::from_value(Value::Object(sections));
        let mut config: RunConfig = config.map_err(|error| ConfigErrors(vec![Problem::new(error)]))?;
        // Sizes that cannot be trained are refused by name later.
        if config.pipeline.layout.as_deref() == Some(AUTO) && config.is_sound() {
            let costs = decoder_of(&config.model.config).part_costs(config.training.seq_length);
            config.pipeline.settle(&config.parallel, &costs);
        }
        if fills_world && config.at_most_ranks().is_sound() {
            config.fill_world(world).map_err(|problem| ConfigErrors(vec![problem]))?;
        }
        Ok(config)
    }
}
