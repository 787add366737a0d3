//! Keys of a `config.json` that tell layers apart.

use super::{ConfigReader, HfError};
use crate::layers::LayerPattern;

/// Hugging Face's word for the attention of each layer.
pub(crate) fn kinds(has_window: impl Fn(usize) -> bool, layers: usize) -> Vec<&'static str> {
    let kind = |layer| if has_window(layer) { "sliding_attention" } else { "full_attention" };
    (0..layers).map(kind).collect()
}

/// Which of `layers` layers have no window: by the list of all layers, else by the key, else `default`.
pub(crate) fn window_pattern(
    config: &ConfigReader,
    layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Option<LayerPattern>, HfError> {
    // transformers 5 writes the second next to a list that need not follow it.
    let [pattern, before] = ["sliding_window_pattern", "_sliding_window_pattern"].map(|key| config.optional_size(key));
    let of_key = pattern?.or(before?).map(LayerPattern::Every);
    let of_list = kind_pattern(config, layers)?;
    Ok(of_list.unwrap_or_else(|| {
        LayerPattern::of(layers, |layer| of_key.as_ref().map_or_else(|| default(layer), |full| full.has(layer)))
    }))
}

/// The layers of full attention by the list of all layers, if the file has it.
pub(crate) fn kind_pattern(config: &ConfigReader, layers: usize) -> Result<Option<Option<LayerPattern>>, HfError> {
    let full = |types: Vec<&str>| LayerPattern::of(layers, |layer| types.get(layer) == Some(&"full_attention"));
    Ok(config.texts("layer_types")?.map(full))
}

/// The window of models that have one only where `use_sliding_window` is true.
pub(crate) fn window_in_use(config: &ConfigReader) -> Result<Option<usize>, HfError> {
    if config.flag("use_sliding_window")? { config.optional_size("sliding_window") } else { Ok(None) }
}

/// The attention of each layer, if the file lists it, must be what the other keys say.
pub(crate) fn expect_kinds(config: &ConfigReader, legal: &[&str]) -> Result<(), HfError> {
    match config.texts("layer_types")? {
        Some(types) if types != legal => {
            let alike = legal.iter().all(|kind| *kind == legal[0]);
            let legal = if alike { format!("{} x {}", legal.len(), legal[0]) } else { listed(legal) };
            Err(config.unsupported("layer_types", &listed(&types), &legal))
        }
        _ => Ok(()),
    }
}

/// A list in words, of a long one the beginning and the length.
fn listed(kinds: &[&str]) -> String {
    const MOST: usize = 64;
    match kinds.len() > MOST {
        true => format!("{}, ... ({} layers)", kinds[..MOST].join(", "), kinds.len()),
        false => kinds.join(", "),
    }
}
