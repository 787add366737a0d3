//! One strict TOML file per run.
//!
//! [`RunConfig::load`] layers defaults, a preset or a Hugging Face folder, the file and the command line.
//! [`RunConfig::check`] says whether the values fit together. [`RunConfig::to_toml`] writes the result with the meaning
//! of every key. [`KEYS`] is the only list of keys. Nothing here knows tensors or threads.
//!
//! ```
//! use burn_megatron::config::RunConfig;
//!
//! let text = "[model]\npreset = \"gpt-tiny\"\n[training]\nsteps = 20\n[data]\ntext = [\"book.txt\"]\n";
//! let overrides = [("parallel.tensor-model-parallel-size".into(), "2".into())];
//! let config = RunConfig::parse("book.toml", text, &overrides).unwrap();
//! assert_eq!(config.parallel.tp, 2);
//! assert_eq!(config.output.directory.to_str(), Some("runs/book"));
//! assert_eq!(RunConfig::parse("again.toml", &config.to_toml(), &[]), Ok(config));
//!
//! let errors = RunConfig::parse("book.toml", "[training]\nsteps = 20\nmicrobatch = 2\n", &[]).unwrap_err();
//! let said = "book.toml:3: unknown key `training.microbatch`; did you mean `training.micro-batch`?";
//! assert_eq!(errors.to_string(), said);
//! ```

mod adapters;
mod changes;
mod check;
mod check_data;
mod check_grpo;
mod check_layout;
mod check_post_training;
mod check_states;
mod data;
mod decoder;
mod derived;
mod find;
mod foreign;
mod inputs;
mod job;
mod key;
mod keys;
mod kind;
mod layer;
mod limits;
mod model;
mod module;
mod module_keys;
mod post_training;
mod problem;
mod render;
mod resolve;
mod run;
mod sections;
#[cfg(test)]
mod tests;
mod world;

pub use data::DataSection;
pub use decoder::decoder_of;
pub use find::find_anywhere;
pub use key::Key;
pub use keys::KEYS;
pub use kind::Kind;
pub(crate) use limits::RANKS;
pub use model::{ModelSection, module_presets, of_megatron, size_names};
pub use module::{ImagesSection, MaskedSection, ModuleConfig, ModuleModel, ModulePipeline};
pub use post_training::{ChatSection, DistillSection, LoraSection, Packing, PreferenceSection};
pub use problem::{ConfigErrors, Origin, Problem};
pub use run::{
    CheckpointSection, EvaluationSection, LogSection, OutputSection, PerformanceSection, Precision, RunConfig,
    TrainingSection,
};
pub use sections::SECTIONS;
pub use world::WorldSize;
