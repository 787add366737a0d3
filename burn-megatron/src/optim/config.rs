//! Which optimizer, with which constants.

use super::adamw::AdamWConfig;
use super::lion::LionConfig;
use super::muon::MuonConfig;
use super::rule::Rule;
use super::sgd::{SgdConfig, Step};
use super::states::StateDtypes;
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// The optimizer of a run. In files a flat table: `kind` (`adamw` if it is missing) and the constants of that kind,
/// each with a default.
///
/// ```
/// use burn_megatron::{optim::MuonConfig, prelude::*};
///
/// let muon = OptimizerConfig::Muon(MuonConfig { weight_decay: 0.1, ..MuonConfig::default() });
/// assert_eq!(muon.moments(), (1, 2), "one moment for hidden matrices, two for all other weights");
///
/// // The same from a configuration file.
/// let text = "kind = \"muon\"\nweight-decay = 0.1";
/// assert_eq!(toml::from_str::<OptimizerConfig>(text)?, muon);
/// # Ok::<(), toml::de::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// Two moments per weight.
    AdamW(AdamWConfig),
    /// One moment per weight, none without momentum.
    Sgd(SgdConfig),
    /// One moment per weight.
    Lion(LionConfig),
    /// One moment per weight of a hidden matrix, AdamW for the others.
    Muon(MuonConfig),
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self::AdamW(AdamWConfig::default())
    }
}

impl From<AdamWConfig> for OptimizerConfig {
    fn from(config: AdamWConfig) -> Self {
        Self::AdamW(config)
    }
}

impl<'de> Deserialize<'de> for OptimizerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        fn of<T: DeserializeOwned, E: Error>(table: Map<String, Value>) -> Result<T, E> {
            serde_json::from_value(Value::Object(table)).map_err(E::custom)
        }
        let mut table = Map::deserialize(deserializer)?;
        match table.remove("kind").unwrap_or_else(|| "adamw".into()).as_str() {
            Some("adamw") => of(table).map(Self::AdamW),
            Some("sgd") => of(table).map(Self::Sgd),
            Some("lion") => of(table).map(Self::Lion),
            Some("muon") => of(table).map(Self::Muon),
            other => {
                let other = other.unwrap_or("which is not a string");
                Err(Error::custom(format!("kind = {other}; there are adamw, sgd, lion and muon")))
            }
        }
    }
}

impl OptimizerConfig {
    /// The element-wise rule of update number `t`, counted from 1; for Muon that of the parameters it does not
    /// orthogonalise.
    pub(super) fn rule(&self, lr: f64, t: u64, grad_scale: f64) -> Rule {
        match self {
            Self::AdamW(config) => Rule::AdamW(config.coefficients(lr, t, grad_scale)),
            Self::Sgd(config) => Rule::Sgd(Step { lr, grad_scale, config: *config }),
            Self::Lion(config) => Rule::Lion(Step { lr, grad_scale, config: *config }),
            Self::Muon(config) => Rule::AdamW(config.adamw().coefficients(lr, t, grad_scale)),
        }
    }

    /// Moments per element: of hidden matrices, and of all other parameters.
    pub fn moments(&self) -> (usize, usize) {
        match self {
            Self::AdamW(_) => (2, 2),
            Self::Sgd(config) if config.momentum == 0.0 => (0, 0),
            Self::Sgd(_) | Self::Lion(_) => (1, 1),
            Self::Muon(_) => (1, 2),
        }
    }

    /// The types of moments and master weights; fp32 for all optimizers but AdamW.
    pub fn states(&self) -> StateDtypes {
        match self {
            Self::AdamW(config) => StateDtypes {
                exp_avg: config.exp_avg_dtype,
                exp_avg_sq: config.exp_avg_sq_dtype,
                main_grads: config.main_grads_dtype,
                main_params: config.main_params_dtype,
            },
            _ => StateDtypes::default(),
        }
    }

    /// Share of the parameters whose states are in host memory.
    pub fn offload(&self) -> f64 {
        match self {
            Self::AdamW(config) if config.cpu_offload => config.offload_fraction,
            _ => 0.0,
        }
    }

    /// Share of a decayed parameter that is removed per step, times the learning rate.
    pub fn weight_decay(mut self) -> f64 {
        *self.decay().0
    }

    /// The same with another weight decay.
    pub(super) fn with_weight_decay(mut self, share: f64) -> Self {
        *self.decay().0 = share;
        self
    }

    /// Whether vectors decay too.
    pub(super) fn decays_vectors(mut self) -> bool {
        self.decay().1
    }

    fn decay(&mut self) -> (&mut f64, bool) {
        match self {
            Self::AdamW(config) => (&mut config.weight_decay, config.decay_vectors),
            Self::Sgd(config) => (&mut config.weight_decay, config.decay_vectors),
            Self::Lion(config) => (&mut config.weight_decay, config.decay_vectors),
            Self::Muon(config) => (&mut config.weight_decay, config.decay_vectors),
        }
    }

    /// Muon's constants, if it is Muon.
    pub(super) fn muon(&self) -> Option<&MuonConfig> {
        if let Self::Muon(config) = self { Some(config) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::super::muon::MuonScale;
    use super::*;

    #[test]
    fn a_flat_table_names_the_kind() {
        let read = |text: &str| toml::from_str::<OptimizerConfig>(text);
        assert_eq!(read("").unwrap(), OptimizerConfig::default());
        let adamw = AdamWConfig { beta2: 0.95, ..AdamWConfig::default() };
        assert_eq!(read("beta2 = 0.95").unwrap(), adamw.into());
        let sgd = SgdConfig { nesterov: true, ..SgdConfig::default() };
        assert_eq!(read("kind = \"sgd\"\nnesterov = true").unwrap(), OptimizerConfig::Sgd(sgd));
        assert_eq!(read("kind = \"lion\"").unwrap(), OptimizerConfig::Lion(LionConfig::default()));
        let muon = MuonConfig { scale: MuonScale::UnitRms, beta1: 0.8, ..MuonConfig::default() };
        let table = "kind = \"muon\"\nscale = \"unit-rms\"\nbeta1 = 0.8";
        assert_eq!(read(table).unwrap(), OptimizerConfig::Muon(muon));
        for config in [adamw.into(), OptimizerConfig::Sgd(sgd), OptimizerConfig::Muon(muon)] {
            assert_eq!(read(&toml::to_string(&config).unwrap()).unwrap(), config);
        }
    }

    #[test]
    fn what_does_not_belong_is_named() {
        let error = |text: &str| toml::from_str::<OptimizerConfig>(text).unwrap_err().to_string();
        assert!(error("kind = \"sgd\"\nbeta1 = 0.9").contains("beta1"));
        assert!(error("kind = \"adam\"").contains("kind = adam; there are adamw, sgd, lion and muon"));
    }
}
