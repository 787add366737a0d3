//! What a run would do, before anything large is read.

mod description;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::{HumanBytes, HumanCount};
use models::lora::Adapter;
use models::{LoraConfig, ModelConfig};
use serde_json::json;

use super::TrainError;
use super::data::tokenizer_file;
use super::resume::{self, ResumePoint};
use super::same_weights::{self, Folders};
use crate::config::{ConfigErrors, Problem, RunConfig};
use crate::data::indexed::IndexedDataset;
use crate::data::{Split, check_samples};
use crate::grpo::Reward;
use crate::hf::{HfFolder, read_adapter};
use crate::learner::Faults;

/// A run that passed all checks; `Display` describes it.
#[derive(Clone, Debug)]
pub struct Plan {
    config: RunConfig,
    allowed: Vec<String>,
    /// Parameters of the whole model.
    pub parameters: usize,
    /// The checkpoint that the run resumes from.
    pub start: Option<ResumePoint>,
    /// What is to go wrong.
    pub faults: Faults,
    weights: Option<Arc<HfFolder>>,
    adapter: Option<Adapter>,
    teacher: Option<Arc<HfFolder>>,
    reward: Option<Arc<dyn Reward>>,
    /// One line per data file.
    data: Vec<String>,
}

impl Plan {
    /// Checks the configuration and what lies on disk. Nothing is written, and of the data only the headers are read.
    /// When the run resumes from a checkpoint, keys that decide what it learns must not have changed, except those in
    /// `allowed`.
    ///
    /// # Errors
    /// Everything that is wrong.
    pub fn new(config: &RunConfig, allowed: &[String]) -> Result<Self, ConfigErrors> {
        config.check()?;
        let (mut problems, mut data) = (Vec::new(), Vec::new());
        let mut found = |line: Result<String, String>| match line {
            Ok(line) => data.push(line),
            Err(what) => problems.push(Problem::new(what)),
        };
        config.data.text.iter().for_each(|file| found(source_file("data.text", file)));
        config.distill.logits.iter().for_each(|file| found(source_file("distill.logits", file)));
        config.data.prefixes.iter().for_each(|prefix| found(indexed(config, prefix)));
        let (chat, preference) = (&config.chat, &config.preference);
        for (key, files) in [
            ("chat.train", &chat.train),
            ("chat.validation", &chat.validation),
            ("preference.train", &preference.train),
            ("preference.validation", &preference.validation),
            ("grpo.train", &config.grpo.train),
            ("evaluation.tasks", &config.evaluation.tasks),
        ] {
            files.iter().for_each(|file| found(source_file(key, file)));
        }
        for (key, template) in
            [("chat", &chat.template), ("preference", &preference.template), ("grpo", &config.grpo.template)]
        {
            let missing = template.iter().filter(|template| !template.is_file());
            let what = |path: &PathBuf| Problem::new(format!("{key}.template: there is no file {}", path.display()));
            problems.extend(missing.map(what));
        }
        problems.extend(missing_tokenizer(config));
        problems.extend(too_many_samples(config));
        problems.extend(config.performance.moe_router_force_load_balancing.then(|| {
            let what = "performance.moe-router-force-load-balancing = true has tokens use experts at random: it is for `bench` and \
                        no model learns to route with it; nearest legal: false";
            Problem::new(what)
        }));
        problems.extend(not_a_folder("output.directory", &config.output.directory));
        let checkpoints = config.checkpoint.directory.as_deref();
        let start = match checkpoints.and_then(|folder| not_a_folder("checkpoint.directory", folder)) {
            Some(problem) => Err(vec![problem]),
            None => resume::find(config, allowed),
        };
        let weights = initial_weights(config);
        let adapter = config.lora.adapter.as_deref().filter(|_| config.lora.rank.is_some());
        let adapter = adapter.map(|path| initial_adapter(config, path)).transpose();
        let teacher = teacher(config);
        let mut keep = |more: Vec<Problem>| problems.extend(more);
        let start = start.map_err(&mut keep).unwrap_or_default();
        let weights = weights.map_err(|problem| keep(vec![problem])).unwrap_or_default();
        let adapter = adapter.map_err(|problem| keep(vec![problem])).unwrap_or_default();
        let teacher = teacher.map_err(|problem| keep(vec![problem])).unwrap_or_default();
        ConfigErrors::from_problems(problems)?;
        let parameters = config.model.config.parameter_count();
        let plan = Self {
            config: config.clone(),
            allowed: allowed.to_vec(),
            parameters,
            start,
            faults: Faults::default(),
            weights,
            adapter,
            teacher,
            reward: None,
            data,
        };
        if let Some(start) = &plan.start {
            ConfigErrors::from_problems(same_weights::problems(start, &plan.read_again(), allowed))?;
        }
        Ok(plan)
    }

    /// Whether `data.tokenizer` can be read and is not too large for the model, which takes a moment. The error says
    /// what is wrong with it.
    pub fn check_tokenizer(&self) -> Result<(), TrainError> {
        if self.config.grpo.is_used() {
            return super::grpo::check_tokenizer(&self.config).map(drop);
        }
        match self.config.has_conversations() {
            true => super::templated::tokenizer(&self.config).map(drop),
            false => tokenizer_file(&self.config).map(drop),
        }
    }

    /// Completions of `[grpo]` are judged by this, in place of the configuration's exact match.
    pub fn with_reward(mut self, reward: impl Reward + 'static) -> Self {
        self.reward = Some(Arc::new(reward));
        self
    }

    /// What [`with_reward`](Self::with_reward) has named.
    pub(super) fn reward(&self) -> Option<Arc<dyn Reward>> {
        self.reward.clone()
    }

    /// The configuration.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// The Hugging Face folder that the model comes from.
    pub(super) fn folder(&self) -> Option<&HfFolder> {
        self.weights.as_deref()
    }

    /// The folder that the first weights come from; a checkpoint to resume from has all but those that are frozen.
    pub(super) fn weights(&self) -> Option<Arc<HfFolder>> {
        let again = || self.read_again().into_iter().find(|(key, _)| *key == "model.hf").map(|(_, folder)| folder);
        if self.start.is_none() { self.weights.clone() } else { again() }
    }

    /// The folders that are read whenever the run begins: the base of adapters, a reference model, a teacher.
    pub(super) fn read_again(&self) -> Folders {
        let is_frozen = self.config.lora.rank.is_some() || self.config.has_reference();
        let base = self.weights.clone().filter(|_| is_frozen);
        let all = [("model.hf", base), ("distill.teacher", self.teacher())];
        all.into_iter().filter_map(|(key, folder)| Some((key, folder?))).collect()
    }

    /// The adapter that the run starts from; a checkpoint to resume from has its own.
    pub(super) fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }

    /// The model that the run learns from.
    pub(super) fn teacher(&self) -> Option<Arc<HfFolder>> {
        self.teacher.clone()
    }

    /// Whether the run may read other samples than the one that it resumes from.
    pub(super) fn other_data(&self) -> bool {
        resume::may_read_other_data(&self.allowed)
    }
}

/// The folder of `model.hf`, whose tensors must have the shapes of the model.
fn initial_weights(config: &RunConfig) -> Result<Option<Arc<HfFolder>>, Problem> {
    let Some(path) = &config.model.hf else { return Ok(None) };
    let folder = HfFolder::open(path).map_err(|error| Problem::new(format!("model.hf: {error}")))?;
    let (theirs, ours) = (folder.config().hf_names(), config.model.config.hf_names());
    let shapes: BTreeMap<&str, Vec<usize>> = theirs.iter().map(|(name, tensor)| (name, tensor.our_shape())).collect();
    for (name, tensor) in ours.iter() {
        let (needed, there) = (tensor.our_shape(), shapes.get(name));
        if there != Some(&needed) {
            let there = there.map_or("lacks it".into(), |shape| format!("has {shape:?}"));
            let what = format!("model: tensor {name} is to be {needed:?}, {} {there}: leave its sizes", path.display());
            return Err(Problem::new(what));
        }
    }
    Ok(Some(Arc::new(folder)))
}

/// The folder of `distill.teacher`, which must have the tokens of the model and run in its layout.
fn teacher(config: &RunConfig) -> Result<Option<Arc<HfFolder>>, Problem> {
    let Some(path) = &config.distill.teacher else { return Ok(None) };
    let refused = |what: String| Problem::new(format!("distill.teacher = {}: {what}", path.display()));
    let folder = HfFolder::open(path).map_err(|error| refused(error.to_string()))?;
    let [theirs, ours] = [folder.config(), &config.model.config].map(ModelConfig::vocab_size);
    if theirs != ours {
        return Err(refused(format!(
            "it has {theirs} tokens, but model.vocab-size = {ours}; both models must have the same tokenizer"
        )));
    }
    let fits = folder.config().dims().check(&config.parallel, config.training.seq_length);
    fits.map_err(|error| refused(error.to_string()))?;
    Ok(Some(Arc::new(folder)))
}

/// The adapter of `lora.adapter`, which must be one as `[lora]` says.
fn initial_adapter(config: &RunConfig, path: &Path) -> Result<Adapter, Problem> {
    let adapter =
        read_adapter(path, &config.model.config).map_err(|error| Problem::new(format!("lora.adapter: {error}")))?;
    let ours = config.lora.plan(&config.model.config).ok().flatten();
    let same = ours.is_some_and(|ours| ours.is_like(&adapter.plan));
    if !same {
        let LoraConfig { rank, alpha, rslora, dora, rank_pattern, alpha_pattern, .. } = adapter.plan.config();
        let patterns = [("rank-pattern", json!(rank_pattern)), ("alpha-pattern", json!(alpha_pattern))];
        let patterns = patterns.iter().filter(|(_, own)| *own != json!({}));
        let patterns: String = patterns.map(|(key, own)| format!(", {key} = {own}")).collect();
        return Err(Problem::new(format!(
            "lora.adapter = {}: it has rank = {rank}, alpha = {alpha}, rslora = {rslora}, dora = {dora}{patterns} on {} layers, \
             [lora] says otherwise; give these values, and its target-modules",
            path.display(),
            adapter.plan.len()
        )));
    }
    Ok(adapter)
}

/// A file of text or conversations.
fn source_file(key: &str, file: &Path) -> Result<String, String> {
    let about = std::fs::metadata(file).map_err(|error| format!("{key}: {}: {error}", file.display()))?;
    let size = about.len();
    if about.is_dir() {
        return Err(format!("{key}: {} is a folder; name its .txt, .jsonl or .parquet files", file.display()));
    }
    if about.is_file() && size == 0 {
        return Err(format!("{key}: {} is empty", file.display()));
    }
    let what = match key {
        "data.text" => "text",
        "evaluation.tasks" => "tasks",
        "grpo.train" => "prompts",
        _ => "conversations",
    };
    Ok(format!("{}: {} bytes of {what}", file.display(), HumanCount(size)))
}

fn indexed(config: &RunConfig, prefix: &Path) -> Result<String, String> {
    let data = IndexedDataset::open(prefix).map_err(|error| format!("data.prefixes: {error}"))?;
    let ranges = config.data.split.ranges(data.num_sequences());
    let used = [true, config.evaluation.batches > 0, false];
    for (part, range) in Split::ALL.iter().zip(&ranges) {
        let empty = range.as_ref().is_some_and(|range| range.is_empty());
        if used[*part as usize] && empty {
            let (split, sequences) = (&config.data.split, data.num_sequences());
            let name = part.name();
            return Err(format!(
                "data.split = {split} leaves {name} none of the {sequences} sequences of {}",
                prefix.display()
            ));
        }
    }
    let tokens = HumanCount(data.num_tokens() as u64);
    Ok(format!("{}: {tokens} tokens in {} documents", prefix.display(), HumanCount(data.num_documents() as u64)))
}

/// Samples whose order does not fit into memory.
fn too_many_samples(config: &RunConfig) -> Option<Problem> {
    let (bytes, available, nearest) = check_samples(config.data.samples).err()?;
    Some(Problem::new(format!(
        "data.samples = {} (by default all that training.steps = {} take): their order takes {} of memory, {} are \
         available; nearest legal: data.samples = {nearest}",
        config.data.samples,
        config.training.steps,
        HumanBytes(bytes),
        HumanBytes(available)
    )))
}

fn missing_tokenizer(config: &RunConfig) -> Option<Problem> {
    let path = config.data.tokenizer.as_deref().filter(|name| !["char", "byte", "bpe"].contains(name))?;
    let missing = !Path::new(path).is_file();
    missing.then(|| Problem::new(format!("data.tokenizer: there is no file {path}; char, byte and bpe need none")))
}

/// Whether there is a file where a folder is needed.
fn not_a_folder(key: &str, folder: &Path) -> Option<Problem> {
    let there = folder.ancestors().find(|ancestor| ancestor.exists())?;
    (!there.is_dir()).then(|| Problem::new(format!("{key} = {}: {} is a file", folder.display(), there.display())))
}
