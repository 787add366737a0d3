//! The configuration of a run of a plain Burn module (BERT, T5, ViT, LLaVA), every value resolved.

use std::path::PathBuf;

use backend_dist::mesh::{Nearest, ParallelLayout};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::data::DataSection;
use super::keys::KEYS;
use super::limits::RANKS;
use super::model::kebab;
use super::module_keys::is_taken;
use super::post_training::LoraSection;
use super::problem::Problem;
use super::render::{has_meaning, line};
use super::run::{CheckpointSection, EvaluationSection, LogSection, OutputSection, TrainingSection};
use super::sections::SECTIONS;
use crate::checkpoint::SaveEvery;
use crate::engine::ParamGroups;
use crate::lr::LrConfig;
use crate::optim::AdamWConfig;
use crate::schedule::ScheduleKind;

/// The model of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleModel {
    /// Folder that initial weights are read from; without one they are random.
    pub hf: Option<PathBuf>,
    /// Name of published sizes.
    pub preset: Option<String>,
    /// Sizes in place of those of folder or preset, under Hugging Face's names.
    pub sizes: Map<String, Value>,
    /// The `config.json` of all sizes.
    pub config: Value,
}

impl ModuleModel {
    /// Its family.
    pub fn model_type(&self) -> &str {
        self.config["model_type"].as_str().unwrap_or_default()
    }
}

/// `[masked]`
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct MaskedSection {
    /// Share of the tokens that are masked.
    pub mask_prob: f64,
    /// Share of the samples that are shorter.
    pub short_seq_prob: f64,
    /// T5: tokens of the output.
    pub decoder_seq_length: usize,
    /// T5: number of sentinels.
    pub vocab_extra_ids: usize,
}

/// `[images]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct ImagesSection {
    /// Lists to train on.
    pub train: Vec<PathBuf>,
    /// Lists to evaluate on; without them a share of the others.
    pub validation: Vec<PathBuf>,
    /// How pixels are made of an image.
    pub processor: Option<PathBuf>,
    /// LLaVA: chat template of messages.
    pub template: Option<PathBuf>,
    /// Samples that cannot be used are left out.
    pub skip_bad_rows: bool,
}

/// `[pipeline]`
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModulePipeline {
    /// The order of the passes.
    pub schedule: Option<ScheduleKind>,
}

/// Everything that one TOML file says about the run of a BERT, T5, ViT or LLaVA. Its keys are some of those of a
/// [`RunConfig`](crate::config::RunConfig); others are refused by name.
///
/// ```
/// use burn_megatron::config::ModuleConfig;
///
/// let text = "[model]\npreset = \"bert-base\"\n[data]\nprefixes = [\"wiki\"]\ntokenizer = \"vocab.json\"\n";
/// let config = ModuleConfig::parse("bert.toml", text, &[])?.expect("it is one");
/// assert_eq!((config.model.model_type(), config.model.config["num_hidden_layers"].as_u64()), ("bert", Some(12)));
/// assert_eq!(ModuleConfig::parse("again.toml", &config.to_toml(), &[])?.as_ref(), Some(&config));
/// assert_eq!(ModuleConfig::parse("llama.toml", "[model]\npreset = \"llama3-8b\"\n", &[])?, None);
/// let refused = ModuleConfig::parse("bert.toml", &format!("{text}[fp8]\nformat = \"hybrid\"\n"), &[]).unwrap_err();
/// assert!(refused.to_string().starts_with("bert.toml:7: fp8.format = hybrid has no meaning with bert"), "{refused}");
/// # Ok::<(), burn_megatron::config::ConfigErrors>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModuleConfig {
    /// The model.
    pub model: ModuleModel,
    /// The parallel layout.
    pub parallel: ParallelLayout,
    /// Pipeline schedule.
    pub pipeline: ModulePipeline,
    /// Length, batch, precision.
    pub training: TrainingSection,
    /// Learning-rate schedule.
    pub lr: LrConfig,
    /// AdamW.
    pub optimizer: AdamWConfig,
    /// Training data.
    pub data: DataSection,
    /// What is masked.
    pub masked: MaskedSection,
    /// Images to learn from.
    #[serde(default)]
    pub images: ImagesSection,
    /// Parameters that are not trained.
    #[serde(default, rename = "param-groups")]
    pub param_groups: ParamGroups,
    /// Adapters.
    #[serde(default)]
    pub lora: LoraSection,
    /// Loss on held-out data.
    pub evaluation: EvaluationSection,
    /// Saving and resuming.
    pub checkpoint: CheckpointSection,
    /// Output folder.
    pub output: OutputSection,
    /// Additional log files.
    pub log: LogSection,
}

impl ModuleConfig {
    /// The configuration as TOML.
    pub fn to_toml(&self) -> String {
        let mut values = serde_json::to_value(self).expect("plain data");
        values["optimizer"]["kind"] = "adamw".into();
        let mut text = String::new();
        for (section, doc) in SECTIONS {
            let taken =
                KEYS.iter().filter(|key| key.section() == section && is_taken(key.path, self.model.model_type()));
            let shown: Vec<_> = taken.filter(|key| key.section() == "model" || !key.is_resolved_away()).collect();
            if shown.is_empty() {
                continue;
            }
            text += &format!("{}# {doc}\n[{section}]\n", if text.is_empty() { "" } else { "\n" });
            for key in shown.into_iter().filter(|key| has_meaning(key.path, &values)) {
                line(&mut text, key.name(), &values[section][key.name()], key.doc);
            }
            let sizes = self.model.sizes.iter().filter(|_| section == "model");
            sizes.for_each(|(name, value)| line(&mut text, &kebab(name), value, "a size of the model"));
        }
        text
    }

    /// What does not fit together.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let Self { training, evaluation, checkpoint, parallel, .. } = self;
        let mut problems = Vec::new();
        let mut refuse = |what: String| problems.push(Problem::new(what));
        let ranks = [parallel.tp, parallel.pp, parallel.dp].into_iter().fold(1, usize::saturating_mul);
        if ranks as u64 > RANKS {
            refuse(format!("[parallel] has {ranks} ranks; nearest legal: {RANKS}"));
        }
        let share = training.micro_batch.saturating_mul(parallel.dp);
        if !training.global_batch.is_multiple_of(share) {
            let legal = |batch: usize| batch.is_multiple_of(share);
            let nearest =
                Nearest::where_legal(training.global_batch, training.global_batch.saturating_add(share), legal);
            refuse(format!(
                "training.global-batch = {} is no multiple of micro-batch x data-parallel = {share}; nearest legal: {nearest}",
                training.global_batch
            ));
        }
        let period = evaluation.every as u64;
        if let SaveEvery::Steps(every) = checkpoint.every
            && !every.is_multiple_of(period)
        {
            let nearest = (every / period * period).max(period);
            refuse(format!(
                "checkpoint.every = {every}: a checkpoint follows an evaluation, evaluation.every = {period}; nearest legal: {nearest}"
            ));
        }
        let kind = self.model.model_type();
        let (of_images, of_texts) = (["vit", "llava"].contains(&kind), kind != "vit");
        if of_images && self.images.train.is_empty() {
            refuse(format!("images.train has no files; {kind} learns from lists of images, .jsonl or .tar"));
        }
        if !of_images && self.data.prefixes.len() != 1 {
            let found = self.data.prefixes.len();
            refuse(format!("data.prefixes has {found} files; nearest legal: 1, whose sequences are sentences"));
        }
        if of_texts && self.data.tokenizer.as_deref().is_none_or(|name| ["char", "byte", "bpe"].contains(&name)) {
            refuse(format!(
                "data.tokenizer = {}: {kind} needs the file of the tokenizer of {}, which has the special tokens",
                self.data.tokenizer.as_deref().unwrap_or("none"),
                if of_images { "the model" } else { "data.prefixes" },
            ));
        }
        problems
    }
}
