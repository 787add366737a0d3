//! `[chat]`, `[preference]`, `[grpo]`, `[distill]` and `[lora]`: conversations, pairs of answers or prompts as training data,
//! a teacher, and adapters in place of the weights.

use std::collections::BTreeMap;
use std::path::PathBuf;

use models::lora::{BaseFormat, LoraError};
use models::{FamilyConfig, LoraConfig, LoraPlan, ModelConfig};
use serde::{Deserialize, Serialize};

use crate::data::chat::{ChatLoss, ChatSet, TooLong};
use crate::engine::DistillConfig;
use crate::grpo::GrpoConfig;
use crate::preference::PreferenceConfig;

/// `[chat]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ChatSection {
    /// Files of conversations to train on; empty where a run trains on other data.
    pub train: Vec<PathBuf>,
    /// Shares of the files in what is trained on.
    pub weights: Option<Vec<f64>>,
    /// Files of conversations to evaluate on.
    pub validation: Vec<PathBuf>,
    /// A chat template in place of the tokenizer's own.
    pub template: Option<PathBuf>,
    /// Tokens in the loss.
    pub loss: ChatLoss,
    /// Whether samples share sequences.
    pub packing: Packing,
    /// What happens to samples that are longer than a sequence.
    pub too_long: TooLong,
    /// Leave out rows that cannot be used.
    pub skip_bad_rows: bool,
}

/// Whether samples share sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Packing {
    /// Several samples in a sequence.
    #[default]
    BestFit,
    /// One sample in a sequence.
    None,
}

impl ChatSection {
    /// Whether the run trains on conversations.
    pub fn is_used(&self) -> bool {
        !self.train.is_empty()
    }

    /// How `files` become sequences.
    pub fn set(&self, files: &[PathBuf]) -> ChatSet {
        ChatSet {
            files: files.to_vec(),
            loss: self.loss,
            packing: self.packing == Packing::BestFit,
            too_long: self.too_long,
            skip_bad_rows: self.skip_bad_rows,
        }
    }
}

/// `[preference]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PreferenceSection {
    /// Files of pairs to train on; empty where a run trains on other data.
    pub train: Vec<PathBuf>,
    /// Files of pairs to evaluate on.
    pub validation: Vec<PathBuf>,
    /// The loss of a pair.
    #[serde(flatten)]
    pub of_pairs: PreferenceConfig,
    /// A chat template in place of the tokenizer's own.
    pub template: Option<PathBuf>,
    /// Whether pairs share sequences.
    pub packing: Packing,
    /// What happens to pairs that are longer than a sequence.
    pub too_long: TooLong,
    /// Leave out rows that cannot be used.
    pub skip_bad_rows: bool,
}

impl PreferenceSection {
    /// Whether the run trains on pairs of answers.
    pub fn is_used(&self) -> bool {
        !self.train.is_empty()
    }

    /// The loss of pairs, of a run that trains on them.
    pub fn config(&self) -> Option<PreferenceConfig> {
        self.is_used().then_some(self.of_pairs)
    }
}

/// `[grpo]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GrpoSection {
    /// Files of prompts to complete; empty where a run trains on other data.
    pub train: Vec<PathBuf>,
    /// What finds the answer in a completion.
    pub answer_pattern: Option<String>,
    /// The completions and their loss.
    #[serde(flatten)]
    pub of_completions: GrpoConfig,
    /// A chat template in place of the tokenizer's own.
    pub template: Option<PathBuf>,
    /// Leave out rows that cannot be used.
    pub skip_bad_rows: bool,
}

impl GrpoSection {
    /// Whether the run trains on completions of prompts.
    pub fn is_used(&self) -> bool {
        !self.train.is_empty()
    }

    /// The loss, of a run that trains on completions.
    pub fn config(&self) -> Option<GrpoConfig> {
        self.is_used().then_some(self.of_completions)
    }
}

/// `[distill]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct DistillSection {
    /// Folder of the teacher; without it there is none.
    pub teacher: Option<PathBuf>,
    /// File that a teacher has written, in place of a teacher.
    pub logits: Option<PathBuf>,
    /// Both models' logits are divided by it.
    pub temperature: f64,
    /// Share of the KL divergence in the loss.
    pub weight: f64,
}

impl DistillSection {
    /// The constants, of a run that has a teacher or its file.
    pub fn config(&self) -> Option<DistillConfig> {
        let Self { temperature, weight, .. } = *self;
        self.teacher.as_ref().or(self.logits.as_ref()).map(|_| DistillConfig { temperature, weight })
    }
}

/// `[lora]`
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct LoraSection {
    /// Rank; without it there are no adapters.
    pub rank: Option<usize>,
    /// Numerator of the scale.
    pub alpha: f64,
    /// Names of modules, or `all-linear`.
    pub target_modules: Vec<String>,
    /// rsLoRA.
    pub rslora: bool,
    /// DoRA.
    pub dora: bool,
    /// Other ranks, by names of modules.
    #[serde(default)]
    pub rank_pattern: BTreeMap<String, usize>,
    /// Other numerators of the scale.
    #[serde(default)]
    pub alpha_pattern: BTreeMap<String, f64>,
    /// How frozen weights are stored, if not as all weights.
    pub base: Option<BaseFormat>,
    /// An adapter to start from.
    pub adapter: Option<PathBuf>,
}

impl LoraSection {
    /// The adapters, if there are any.
    pub fn config(&self) -> Option<LoraConfig> {
        let Self { alpha, rslora, dora, .. } = *self;
        let Self { target_modules, rank_pattern, alpha_pattern, .. } = self.clone();
        self.rank.map(|rank| LoraConfig { rank, alpha, target_modules, rslora, dora, rank_pattern, alpha_pattern })
    }

    /// What is wrong with adapters, by the keys of a run's file in place of peft's.
    pub fn problem(error: &LoraError) -> String {
        let ours = match error.key() {
            "r" => "rank".into(),
            "lora_alpha" => "alpha".into(),
            key => key.replace('_', "-"),
        };
        format!("lora.{ours}{}", &error.to_string()[error.key().len()..])
    }

    /// The adapters of a model, if there are any. Fails if the model cannot have them.
    pub fn plan(&self, model: &FamilyConfig) -> Result<Option<LoraPlan>, LoraError> {
        self.config().map(|config| config.plan(&model.hf_names())).transpose()
    }
}
