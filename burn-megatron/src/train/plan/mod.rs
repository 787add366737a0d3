//! What a run would do, before anything large is read.

mod description;
mod files;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use indicatif::HumanBytes;
use models::lora::Adapter;
use models::{DecoderConfig, FamilyConfig, ModelConfig};

use self::files::{indexed, made_from_text, missing_tokenizer, not_a_file, not_a_folder, source_file};
use super::TrainError;
use super::data::{Tokens, indexed as indexed_tokens, tokenizer_file};
use super::initial_adapter::as_configured;
use super::resume::{self, ResumePoint};
use super::run_data::fits;
use super::same_weights::{self, Folders, Weights};
use crate::config::{ConfigErrors, Problem, RunConfig};
use crate::data::check_samples;
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
        config.data.prefixes.iter().for_each(|prefix| found(indexed(config, "data.prefixes", prefix)));
        for (key, files) in config.data.files_of_their_own() {
            let is_text = !config.data.text.is_empty();
            let line = |file: &PathBuf| if is_text { source_file(key, file) } else { indexed(config, key, file) };
            files.iter().for_each(|file| found(line(file)));
        }
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
        let log = &config.log;
        for (key, folder) in [
            ("data.cache", &config.data.cache),
            ("log.tensorboard", &log.tensorboard),
            ("log.wandb", &log.wandb),
            ("log.mlflow", &log.mlflow),
        ] {
            problems.extend(folder.as_deref().and_then(|folder| not_a_folder(key, folder)));
        }
        for (key, file) in [("log.jsonl", &log.jsonl), ("log.trace", &log.trace)] {
            problems.extend(file.as_deref().and_then(|file| not_a_file(key, file)));
        }
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

    /// Whether `data.tokenizer` can be read and is not too large for the model, and whether the tokens of `data.prefixes`
    /// are theirs, which takes a moment. The error says what is wrong; what is only doubtful is returned.
    pub fn check_tokenizer(&self) -> Result<Option<String>, TrainError> {
        let config = &self.config;
        match (config.has_conversations(), config.data.text.is_empty()) {
            (true, _) if config.grpo.is_used() => super::grpo::check_tokenizer(config).map(|_| None),
            (true, _) => super::templated::tokenizer(config).map(|_| None),
            (false, true) => indexed_tokens(config).map(Tokens::note),
            (false, false) => {
                tokenizer_file(config)?;
                made_from_text(config).map_or(Ok(()), |size| {
                    let made = format!("data.tokenizer = {}", config.data.tokenizer.as_deref().unwrap_or_default());
                    fits(config, size, Some(Path::new(&made)))
                })?;
                Ok(None)
            }
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
        self.weights.clone().filter(|_| self.start.is_none() || self.config.reads_again("model.hf"))
    }

    /// What is read whenever the run begins.
    pub(super) fn read_again(&self) -> Folders<'_> {
        let all = [
            ("model.hf", self.weights.as_deref().map(Weights::Model)),
            ("lora.adapter", self.adapter.as_ref().map(Weights::Adapter)),
            ("distill.teacher", self.teacher.as_deref().map(Weights::Model)),
        ];
        let there = all.into_iter().filter(|(key, _)| self.config.reads_again(key));
        there.filter_map(|(key, weights)| Some((key, weights?))).collect()
    }

    /// The adapter that the run starts from; a checkpoint to resume from has its own, unless it is of the reference.
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
    // A config.json speaks of modules of multi-token prediction whether or not they are there.
    let modules = |model: &FamilyConfig| model.frame().mtp.map_or(0, |mtp| mtp.modules);
    let (found, needed) = (modules(folder.config()), modules(&config.model.config));
    if needed > found {
        let key = format!("model.num-nextn-predict-layers = {needed}");
        return Err(Problem::new(format!("{key}: {} has weights of {found}; nearest legal: {found}", path.display())));
    }
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
    as_configured(path, adapter, ours.as_ref()).map_err(Problem::new)
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
