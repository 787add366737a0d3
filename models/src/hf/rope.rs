//! Rotary parameters in a `config.json`: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4.

use serde_json::{Value, json};

use super::{ConfigReader, HfError};
use crate::layers::{
    DynamicScaling, LinearScaling, Llama3Scaling, LongRopeScaling, PairFactors, RopeScaling, YarnScaling,
};

/// What a configuration says of rotation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    pub scaling: Option<RopeScaling>,
    /// Share of a head's features that are rotated, in models that have the key.
    pub partial: Option<f64>,
    /// Base of the frequencies of layers with a window, in models that have another one there.
    pub local: Option<f64>,
}

/// Base and scaling of the rotary frequencies; `base` is that of a configuration that names none.
pub(crate) fn read(config: &ConfigReader, base: f64) -> Result<(f64, Option<RopeScaling>), HfError> {
    read_of(config, base, None).map(|rope| (rope.theta, rope.scaling))
}

/// The same of a model that rotates some of a head's features: transformers 5 has their share among the rotary
/// parameters.
pub(crate) fn read_partial(config: &ConfigReader, base: f64) -> Result<Rope, HfError> {
    read_of(config, base, Some("partial_rotary_factor"))
}

/// The same of a model with other frequencies in layers with a window (Gemma 3). There is no scaling in these, unless they
/// have the parameters of the other layers.
pub(crate) fn read_by_kind(config: &ConfigReader, [base, local]: [f64; 2]) -> Result<Rope, HfError> {
    let by_kind = match config.object("rope_parameters")? {
        Some(kinds) if kinds.has("full_attention") || kinds.has("sliding_attention") => kinds,
        // transformers looks for the two there, and computes with its defaults.
        Some(_) => {
            let legal = "full_attention and sliding_attention in it";
            return Err(config.unsupported("rope_parameters", "the same for all layers", legal));
        }
        None => {
            let local = config.number("rope_local_base_freq")?.unwrap_or(local);
            return Ok(Rope { local: Some(local), ..read_of(config, base, None)? });
        }
    };
    let of = |kind: &str| by_kind.object(kind)?.ok_or_else(|| HfError::Missing { key: kind.into() });
    let (full, sliding) = (of("full_attention")?, of("sliding_attention")?);
    by_kind.finish(&[])?;
    let Parameters { theta, scaling, .. } = parameters(config, &full, None)?;
    let of_local = parameters(config, &sliding, None)?;
    if scaling.is_some() && (theta, scaling) == (of_local.theta, of_local.scaling) {
        return Ok(Rope { theta: theta.unwrap_or(base), scaling, ..Rope::default() });
    }
    if of_local.scaling.is_some() {
        return Err(sliding.unsupported("rope_type", "scaled in sliding_attention", "default"));
    }
    let local = of_local.theta.unwrap_or(local);
    if !(1.0..f64::INFINITY).contains(&local) {
        return Err(sliding.unsupported("rope_theta", &format!("{local} in sliding_attention"), "at least 1"));
    }
    Ok(Rope { theta: theta.unwrap_or(base), scaling, partial: None, local: Some(local) })
}

/// Whether the configuration has rotary parameters besides the base. `null` says as little as no key, as in transformers 5.
pub(crate) fn is_given(config: &ConfigReader) -> Result<bool, HfError> {
    Ok(config.object("rope_parameters")?.is_some() || config.object("rope_scaling")?.is_some())
}

fn read_of(config: &ConfigReader, base: f64, partial: Option<&str>) -> Result<Rope, HfError> {
    let share = partial.map(|key| config.number(key)).transpose()?.flatten();
    let theta = config.number("rope_theta")?;
    let rope = match (config.object("rope_parameters")?, config.object("rope_scaling")?) {
        (Some(_), Some(_)) => return Err(config.unsupported("rope_scaling", "given twice", "`rope_parameters` alone")),
        (new, old) => new.or(old),
    };
    let Some(rope) = rope else {
        return Ok(Rope { theta: theta.unwrap_or(base), partial: share, ..Rope::default() });
    };
    let Parameters { theta: nested, scaling, further } = parameters(config, &rope, partial)?;
    if let (Some(theta), Some(nested)) = (theta, nested)
        && theta != nested
    {
        return Err(config.unsupported("rope_theta", &theta.to_string(), &nested.to_string()));
    }
    Ok(Rope { theta: nested.or(theta).unwrap_or(base), scaling, partial: further.or(share), local: None })
}

/// What an object of rotary parameters says, next to the keys of the whole model; `further` is the number of a further key.
struct Parameters {
    theta: Option<f64>,
    scaling: Option<RopeScaling>,
    further: Option<f64>,
}

fn parameters(config: &ConfigReader, rope: &ConfigReader, further: Option<&str>) -> Result<Parameters, HfError> {
    let scaling = match rope.text("rope_type")?.or(rope.text("type")?) {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear(LinearScaling { factor: rope.required_number("factor")? })),
        Some("dynamic") => Some(RopeScaling::Dynamic(DynamicScaling {
            factor: rope.required_number("factor")?,
            original_max_position_embeddings: config.size("max_position_embeddings")?,
        })),
        Some("llama3") => Some(RopeScaling::Llama3(Llama3Scaling {
            factor: rope.required_number("factor")?,
            low_freq_factor: rope.required_number("low_freq_factor")?,
            high_freq_factor: rope.required_number("high_freq_factor")?,
            original_max_position_embeddings: rope.size("original_max_position_embeddings")?,
        })),
        Some("yarn") => Some(RopeScaling::Yarn(YarnScaling::read_hf(rope)?)),
        Some("longrope" | "su") => Some(RopeScaling::LongRope(LongRopeScaling::read_hf(config, rope)?)),
        Some(other) => {
            return Err(rope.unsupported("rope_type", other, "default, linear, dynamic, llama3, yarn, longrope"));
        }
    };
    let (theta, further) = (rope.number("rope_theta")?, further.map(|key| rope.number(key)).transpose()?.flatten());
    rope.finish(&[])?;
    Ok(Parameters { theta, scaling, further })
}

/// `rope_parameters`.
pub(crate) fn written(theta: f64, scaling: Option<RopeScaling>) -> Value {
    let mut rope = json!({"rope_theta": theta, "rope_type": scaling.map_or("default", |scaling| scaling.name())});
    if let (Some(rope), Value::Object(keys)) = (rope.as_object_mut(), json!(scaling)) {
        rope.extend(keys.into_iter().filter(|(_, value)| !value.is_null()));
        if matches!(scaling, Some(RopeScaling::Dynamic(_))) {
            // There it is the model's `max_position_embeddings`.
            rope.remove("original_max_position_embeddings");
        }
    }
    rope
}

impl YarnScaling {
    /// Reads the keys of a `config.json`'s rotary parameters whose type is `yarn`.
    fn read_hf(rope: &ConfigReader) -> Result<Self, HfError> {
        let original = rope.size("original_max_position_embeddings")?;
        let plain = Self::new(rope.required_number("factor")?, original);
        Ok(Self {
            beta_fast: rope.number("beta_fast")?.unwrap_or(plain.beta_fast),
            beta_slow: rope.number("beta_slow")?.unwrap_or(plain.beta_slow),
            mscale: rope.number("mscale")?,
            mscale_all_dim: rope.number("mscale_all_dim")?,
            attention_factor: rope.number("attention_factor")?,
            truncate: rope.flag_or("truncate", plain.truncate)?,
            ..plain
        })
    }
}

impl LongRopeScaling {
    /// Reads the keys of a `config.json`'s rotary parameters whose type is `longrope`, which was called `su` at first. The
    /// original context may be among the keys of the model (Phi-3), where it counts more.
    fn read_hf(config: &ConfigReader, rope: &ConfigReader) -> Result<Self, HfError> {
        const ORIGINAL: &str = "original_max_position_embeddings";
        let nested = rope.optional_size(ORIGINAL)?;
        let original =
            config.optional_size(ORIGINAL)?.or(nested).ok_or_else(|| HfError::Missing { key: ORIGINAL.into() })?;
        let factors = |key: &str| {
            let numbers = rope.numbers(key)?;
            let given = numbers.len();
            PairFactors::try_from(numbers)
                .map_err(|_| rope.unsupported(key, &format!("{given} numbers"), "at most 128"))
        };
        let stretched = config.size("max_position_embeddings")? as f64 / original as f64;
        Ok(Self {
            original_max_position_embeddings: original,
            factor: rope.number("factor")?.unwrap_or(stretched),
            short_factor: factors("short_factor")?,
            long_factor: factors("long_factor")?,
            attention_factor: rope.number("attention_factor")?,
        })
    }
}
