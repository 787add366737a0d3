//! Rotary parameters in a `config.json`: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` of 4.

use serde_json::{Map, Value, json};

use super::{ConfigReader, HfError};
use crate::layers::{LinearScaling, Llama3Scaling, RopeScaling, YarnScaling};

/// Base and scaling of the rotary frequencies; `base` is that of a configuration that names none.
pub(crate) fn read(config: &ConfigReader, base: f64) -> Result<(f64, Option<RopeScaling>), HfError> {
    let theta = config.number("rope_theta")?;
    let rope = match (config.object("rope_parameters")?, config.object("rope_scaling")?) {
        (Some(_), Some(_)) => return Err(config.unsupported("rope_scaling", "given twice", "`rope_parameters` alone")),
        (new, old) => new.or(old),
    };
    let Some(rope) = rope else { return Ok((theta.unwrap_or(base), None)) };
    let nested = rope.number("rope_theta")?;
    if let (Some(theta), Some(nested)) = (theta, nested)
        && theta != nested
    {
        return Err(config.unsupported("rope_theta", &theta.to_string(), &nested.to_string()));
    }
    let scaling = match rope.text("rope_type")?.or(rope.text("type")?) {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear(LinearScaling { factor: rope.required_number("factor")? })),
        Some("llama3") => Some(RopeScaling::Llama3(Llama3Scaling {
            factor: rope.required_number("factor")?,
            low_freq_factor: rope.required_number("low_freq_factor")?,
            high_freq_factor: rope.required_number("high_freq_factor")?,
            original_max_position_embeddings: rope.size("original_max_position_embeddings")?,
        })),
        Some("yarn") => Some(RopeScaling::Yarn(YarnScaling::read_hf(&rope)?)),
        Some(other) => return Err(rope.unsupported("rope_type", other, "default, linear, llama3, yarn")),
    };
    rope.finish(&[])?;
    Ok((nested.or(theta).unwrap_or(base), scaling))
}

/// `rope_parameters`.
pub(crate) fn written(theta: f64, scaling: Option<RopeScaling>) -> Value {
    let mut rope = Map::new();
    rope.insert("rope_theta".into(), json!(theta));
    match scaling {
        None => drop(rope.insert("rope_type".into(), json!("default"))),
        Some(RopeScaling::Linear(scaling)) => {
            rope.insert("rope_type".into(), json!("linear"));
            rope.insert("factor".into(), json!(scaling.factor));
        }
        Some(RopeScaling::Llama3(scaling)) => {
            rope.insert("rope_type".into(), json!("llama3"));
            rope.insert("factor".into(), json!(scaling.factor));
            rope.insert("low_freq_factor".into(), json!(scaling.low_freq_factor));
            rope.insert("high_freq_factor".into(), json!(scaling.high_freq_factor));
            let original = json!(scaling.original_max_position_embeddings);
            rope.insert("original_max_position_embeddings".into(), original);
        }
        Some(RopeScaling::Yarn(scaling)) => {
            rope.insert("rope_type".into(), json!("yarn"));
            scaling.write_hf(&mut rope);
        }
    }
    Value::Object(rope)
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

    /// Adds the keys to a `config.json`'s rotary parameters.
    fn write_hf(&self, rope: &mut Map<String, Value>) {
        let keys = json!({
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_position_embeddings,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
            "attention_factor": self.attention_factor,
            "truncate": self.truncate,
        });
        let Value::Object(keys) = keys else { unreachable!("an object was written") };
        rope.extend(keys.into_iter().filter(|(_, value)| !value.is_null()));
    }
}
