//! Sizes that contradict each other.

use backend_dist::mesh::Nearest;
use burn::tensor::FloatDType;
use thiserror::Error;

use crate::layers::RopeScaling;

/// Why a model's sizes make no model.
#[derive(Clone, Debug, PartialEq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum ConfigError {
    /// A size is not a positive multiple or divisor of another one.
    #[error("{key} = {value} does not divide {of} = {total}; nearest legal: {nearest}")]
    NotADivisor { key: &'static str, value: usize, of: &'static str, total: usize, nearest: Nearest },
    /// A key is set in a model that has no use for it.
    #[error("{key} = {value}: {owner} have it, this model is {variant}; nearest legal: none")]
    Foreign { key: &'static str, value: String, owner: String, variant: String },
    /// A character of a pattern of layers is no layer.
    #[error("{key} = {pattern}: layer {layer} is `{found}`; legal: M (Mamba-2), * (attention), - (MLP), E (experts)")]
    Pattern { key: &'static str, pattern: String, layer: usize, found: char },
    /// A value is outside its range.
    #[error("{key} = {value} is not {range}; nearest legal: {nearest}")]
    OutOfRange { key: &'static str, value: f64, range: &'static str, nearest: f64 },
    /// Residuals are not added in fp32 in a model of 16 bits.
    #[error(
        "residual_in_fp32 = true: in {of} residuals are added in {of}; nearest legal: f32, or residual_in_fp32 = false",
        of = format!("{dtype:?}").to_lowercase()
    )]
    Residuals { dtype: FloatDType },
    /// A size is beyond any model.
    #[error("{key} = {value} is more than this program can hold; nearest legal: {most}")]
    TooLarge { key: String, value: u64, most: u64 },
    /// Sizes are legal, but not together.
    #[error("{sizes} make {count:.1e} {what}, more than {most}; take smaller sizes")]
    TooMany { sizes: String, count: f64, what: &'static str, most: u64 },
}

/// A configuration with sizes of its own, as many to a line as it takes.
#[doc(hidden)]
#[macro_export]
macro_rules! sized {
    ($of:expr; $($size:ident: $value:expr),*) => {{
        let mut config = $of;
        $(config.$size = $value;)*
        config
    }};
}

/// The largest number that divides both; the other one, if one is 0.
pub(crate) fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Refuses a value that is not in a range.
pub(crate) fn expect(
    is_legal: bool,
    (key, value): (&'static str, f64),
    range: &'static str,
    nearest: f64,
) -> Result<(), ConfigError> {
    if is_legal { Ok(()) } else { Err(ConfigError::OutOfRange { key, value, range, nearest }) }
}

/// `value` must divide `total`.
pub(crate) fn divides(key: &'static str, value: usize, of: &'static str, total: usize) -> Result<(), ConfigError> {
    if value > 0 && total.is_multiple_of(value) {
        return Ok(());
    }
    let nearest = Nearest::where_legal(value, total, |x| total.is_multiple_of(x));
    Err(ConfigError::NotADivisor { key, value, of, total, nearest })
}

/// `value` must be even and positive.
pub(crate) fn even(key: &'static str, value: usize) -> Result<(), ConfigError> {
    let nearest = (value + 1) as f64 + if value == 0 { 1.0 } else { 0.0 };
    expect(value > 0 && value.is_multiple_of(2), (key, value as f64), "even and positive", nearest)
}

/// Sizes must be positive.
pub(crate) fn positive(sizes: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    sizes.iter().try_for_each(|(key, size)| expect(*size > 0, (key, 0.0), "positive", 1.0))
}

/// A convolution sees more than one position.
pub(crate) fn taps(key: &'static str, size: usize) -> Result<(), ConfigError> {
    expect(size > 1, (key, size as f64), "at least 2", 2.0)
}

/// Numbers must be at least 0.
pub(crate) fn not_negative(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    let legal = 0.0..f64::INFINITY;
    numbers.iter().try_for_each(|number| expect(legal.contains(&number.1), *number, "at least 0", 0.0))
}

/// A base of rotary frequencies must make waves.
pub(crate) fn base(key: &'static str, value: f64) -> Result<(), ConfigError> {
    expect((1.0..f64::INFINITY).contains(&value), (key, value), "at least 1", 10_000.0)
}

/// Numbers that activations are divided by must leave them finite.
pub(crate) fn divisors(numbers: &[(&'static str, Option<f64>)]) -> Result<(), ConfigError> {
    const LEAST: f64 = 1e-3;
    const MOST: f64 = 1e6;
    numbers.iter().filter_map(|(key, value)| Some((*key, (*value)?))).try_for_each(|(key, value)| {
        let nearest = if value > MOST { MOST } else { LEAST };
        expect((LEAST..=MOST).contains(&value), (key, value), "at least 0.001 and at most 1e6", nearest)
    })
}

/// Factors that multiply activations must leave them finite.
pub(crate) fn factors(numbers: &[(&'static str, f64)]) -> Result<(), ConfigError> {
    const MOST: f64 = 1e6;
    numbers.iter().try_for_each(|&(key, value)| {
        let nearest = if value > MOST { MOST } else { 0.0 };
        expect((0.0..=MOST).contains(&value), (key, value), "at least 0 and at most 1e6", nearest)
    })
}

/// Base and scaling of the rotary frequencies of so many features must make waves.
pub(crate) fn rotary(theta: f64, scaling: Option<RopeScaling>, rotated: usize) -> Result<(), ConfigError> {
    let refuse = |key, value, range, nearest| Err(ConfigError::OutOfRange { key, value, range, nearest });
    base("rope_theta", theta)?;
    let Some(scaling) = scaling else { return Ok(()) };
    // With LongRoPE the model may be shorter than the original context; its factors are pair by pair.
    let is_long = matches!(scaling, RopeScaling::LongRope(_));
    let (least, range) = if is_long { (f64::MIN_POSITIVE, "above 0") } else { (1.0, "at least 1") };
    if !(least..f64::INFINITY).contains(&scaling.factor()) {
        return refuse("rope_scaling.factor", scaling.factor(), range, 1.0);
    }
    match scaling {
        RopeScaling::Linear(_) => Ok(()),
        RopeScaling::Dynamic(of) => {
            positive(&[("rope_scaling.original_max_position_embeddings", of.original_max_position_embeddings)])?;
            let range = "4 or more with dynamic NTK scaling, of features of a head that are rotated";
            expect(rotated >= 4, ("head_dim", rotated as f64), range, 4.0)
        }
        RopeScaling::Llama3(of) if !(of.low_freq_factor > 0.0 && of.low_freq_factor.is_finite()) => {
            refuse("rope_scaling.low_freq_factor", of.low_freq_factor, "above 0", 1.0)
        }
        RopeScaling::Llama3(of) if !(of.high_freq_factor > of.low_freq_factor && of.high_freq_factor.is_finite()) => {
            let nearest = 4.0 * of.low_freq_factor;
            refuse("rope_scaling.high_freq_factor", of.high_freq_factor, "above low_freq_factor", nearest)
        }
        RopeScaling::Llama3(_) => Ok(()),
        RopeScaling::Yarn(of) => {
            let turns = [("rope_scaling.beta_fast", of.beta_fast, 32.0), ("rope_scaling.beta_slow", of.beta_slow, 1.0)];
            if let Some((key, value, nearest)) = turns.into_iter().find(|(_, v, _)| !(*v > 0.0 && v.is_finite())) {
                return refuse(key, value, "above 0", nearest);
            }
            factors(&[
                ("rope_scaling.mscale", of.mscale.unwrap_or(0.0)),
                ("rope_scaling.mscale_all_dim", of.mscale_all_dim.unwrap_or(0.0)),
                ("rope_scaling.attention_factor", of.attention_factor.unwrap_or(0.0)),
            ])
        }
        RopeScaling::LongRope(of) => {
            const PAIRS: &str =
                "a number for each pair of rotated features, head_dim × partial_rotary_factor / 2 of them";
            const ORIGINAL: &str = "rope_scaling.original_max_position_embeddings";
            if of.original_max_position_embeddings < 2 {
                return refuse(ORIGINAL, of.original_max_position_embeddings as f64, "at least 2", 2.0);
            }
            let lists = [("rope_scaling.short_factor", of.short_factor), ("rope_scaling.long_factor", of.long_factor)];
            for (key, list) in lists {
                let (list, pairs) = (list.as_slice(), rotated / 2);
                if list.len() != pairs {
                    return refuse(key, list.len() as f64, PAIRS, pairs as f64);
                }
                if let Some(factor) = list.iter().find(|factor| !(0.01..=1e6).contains(*factor)) {
                    return refuse(key, *factor, "at least 0.01 and at most 1e6", 1.0);
                }
            }
            factors(&[("rope_scaling.attention_factor", of.attention_factor.unwrap_or(0.0))])
        }
    }
}

/// A share of dropped elements must leave some.
pub(crate) fn share(key: &'static str, value: f64) -> Result<(), ConfigError> {
    let nearest = if value >= 1.0 { 0.99 } else { 0.0 };
    expect((0.0..1.0).contains(&value), (key, value), "at least 0 and below 1", nearest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::{Llama3Scaling, YarnScaling};

    #[test]
    fn frequencies_that_make_no_waves_are_refused_by_name() {
        let said = |theta, scaling| rotary(theta, scaling, 8).unwrap_err().to_string();
        assert_eq!(said(0.5, None).split(';').next(), Some("rope_theta = 0.5 is not at least 1"));
        let (factor, low_freq_factor, high_freq_factor, original_max_position_embeddings) = (8.0, 1.0, 4.0, 64);
        let llama3 = Llama3Scaling { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings };
        rotary(1e4, Some(RopeScaling::Llama3(llama3)), 8).unwrap();
        let equal = Llama3Scaling { high_freq_factor: 1.0, ..llama3 };
        assert!(
            said(1e4, Some(RopeScaling::Llama3(equal))).contains("high_freq_factor = 1 is not above low_freq_factor")
        );
        let yarn = YarnScaling::new(4.0, 64);
        rotary(1e4, Some(RopeScaling::Yarn(yarn)), 8).unwrap();
        for (key, yarn) in [
            ("beta_fast = 0 is not above 0", YarnScaling { beta_fast: 0.0, ..yarn }),
            ("beta_slow = NaN is not above 0", YarnScaling { beta_slow: f64::NAN, ..yarn }),
            ("mscale = -1 is not at least 0 and at most 1e6", YarnScaling { mscale: Some(-1.0), ..yarn }),
            ("attention_factor = 10000000 is not", YarnScaling { attention_factor: Some(1e7), ..yarn }),
        ] {
            let said = said(1e4, Some(RopeScaling::Yarn(yarn)));
            assert!(said.contains(key), "{said}");
        }
    }
}
