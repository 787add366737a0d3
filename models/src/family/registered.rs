//! What can be asked of a family without a model of it.

use serde_json::Value;

use super::FamilyConfig;
use super::about::{Family, MegatronModel, Sample, SampleSizes};
use crate::hf::{HfArchitecture, HfError};

/// A family by its name, and the answers of its [`Family`].
pub(super) struct Registered {
    pub name: &'static str,
    pub architectures: fn() -> Vec<HfArchitecture>,
    /// Keys that no other family has.
    pub sizes: &'static [(&'static str, &'static str)],
    pub presets: fn() -> Vec<(&'static str, FamilyConfig)>,
    pub samples: fn(&SampleSizes) -> Vec<Sample<FamilyConfig>>,
    pub read_hf: fn(&Value, &str) -> Result<FamilyConfig, HfError>,
    pub of_megatron: fn(&MegatronModel) -> Option<FamilyConfig>,
    pub owners: fn(&str) -> Vec<String>,
    pub is_needed: fn(&str, &Value) -> bool,
}

impl Registered {
    pub const fn of<C: Family + Into<FamilyConfig>>(name: &'static str) -> Self {
        Self {
            name,
            architectures: C::architectures,
            sizes: C::SIZES,
            presets: || C::presets().into_iter().map(|(name, config)| (name, config.into())).collect(),
            samples: |sizes| {
                let of = |Sample { name, about, config }: Sample<C>| Sample { name, about, config: config.into() };
                C::samples(sizes).into_iter().map(of).collect()
            },
            read_hf: |config, kind| C::read_hf(config, kind).map(Into::into),
            of_megatron: |model| C::of_megatron(model).map(Into::into),
            owners: C::owners,
            is_needed: C::is_needed,
        }
    }
}
