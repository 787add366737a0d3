//! Sizes that contradict each other.

use backend_dist::mesh::Nearest;
use thiserror::Error;

use crate::layers::RopeScaling;

/// Why a model's sizes make no model.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum ConfigError {
    /// A size is not a positive multiple or divisor of another one.
    #[error("{key} = {value} does not divide {of} = {total}; nearest legal: {nearest}")]
    NotADivisor {
        /// The key.
        key: &'static str,
        /// Its value.
        value: usize,
        /// The key it should divide.
        of: &'static str,
        /// The value of that key.
        total: usize,
        /// The closest values that would do.
        nearest: Nearest,
    },
    /// A key is set in a model that has no use for it.
    #[error("{key} = {value}: {owner} have it, this model is {variant}; nearest legal: none")]
    Foreign {
        /// The key.
        key: &'static str,
        /// Its value.
        value: usize,
        /// Which models have it.
        owner: &'static str,
        /// The model.
        variant: String,
    },
    /// A value is outside its range.
    #[error("{key} = {value} is not {range}; nearest legal: {nearest}")]
    OutOfRange {
        /// The key.
        key: &'static str,
        /// Its value.
        value: f64,
        /// The range in words.
        range: &'static str,
        /// The closest value that would do.
        nearest: f64,
    },
    /// A size is beyond any model.
    #[error("{key} = {value} is more than this program can hold; nearest legal: {most}")]
    TooLarge {
        /// The key.
        key: String,
        /// Its value.
        value: u64,
        /// The largest legal value.
        most: u64,
    },
    /// Sizes are legal, but not together.
    #[error("{sizes} make {count:.1e} {what}, more than {most}; take smaller sizes")]
    TooMany {
        /// The sizes with their keys.
        sizes: String,
        /// The product of the sizes.
        count: f64,
        /// What it counts.
        what: &'static str,
        /// The most that are legal.
        most: u64,
    },
}

/// `value` must divide `total`.
pub(crate) fn divides(key: &'static str, value: usize, of: &'static str, total: usize) -> Result<(), ConfigError> {
    match value > 0 && total.is_multiple_of(value) {
        true => Ok(()),
        false => {
            let nearest = Nearest::where_legal(value, total, |x| total.is_multiple_of(x));
            Err(ConfigError::NotADivisor { key, value, of, total, nearest })
        }
    }
}

/// `value` must be even and positive.
pub(crate) fn even(key: &'static str, value: usize) -> Result<(), ConfigError> {
    match value > 0 && value.is_multiple_of(2) {
        true => Ok(()),
        false => {
            let nearest = (value + 1) as f64 + if value == 0 { 1.0 } else { 0.0 };
            Err(ConfigError::OutOfRange { key, value: value as f64, range: "even and positive", nearest })
        }
    }
}

/// Sizes must be positive.
pub(crate) fn positive(sizes: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    match sizes.iter().find(|(_, size)| *size == 0) {
        None => Ok(()),
        Some((key, _)) => Err(ConfigError::OutOfRange { key, value: 0.0, range: "positive", nearest: 1.0 }),
    }
}

/// Numbers must be at least 0.
pub(crate) fn not_negative(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    match numbers.iter().find(|(_, value)| !(0.0..f64::INFINITY).contains(value)) {
        None => Ok(()),
        Some((key, value)) => Err(ConfigError::OutOfRange { key, value: *value, range: "at least 0", nearest: 0.0 }),
    }
}

/// Base and scaling of rotary frequencies must make waves, none of them shorter than without the scaling.
pub(crate) fn rotary(theta: f64, scaling: Option<RopeScaling>) -> Result<(), ConfigError> {
    if !(theta > 0.0 && theta.is_finite()) {
        return Err(ConfigError::OutOfRange { key: "rope_theta", value: theta, range: "above 0", nearest: 10_000.0 });
    }
    match scaling.map(|scaling| scaling.factor()).filter(|factor| !(1.0..f64::INFINITY).contains(factor)) {
        None => Ok(()),
        Some(value) => {
            Err(ConfigError::OutOfRange { key: "rope_scaling.factor", value, range: "at least 1", nearest: 1.0 })
        }
    }
}

/// A share of dropped elements must leave some.
pub(crate) fn share(key: &'static str, value: f64) -> Result<(), ConfigError> {
    match (0.0..1.0).contains(&value) {
        true => Ok(()),
        false => {
            let nearest = if value >= 1.0 { 0.99 } else { 0.0 };
            Err(ConfigError::OutOfRange { key, value, range: "at least 0 and below 1", nearest })
        }
    }
}
