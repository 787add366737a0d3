//! Keys of a `config.json` that tell layers apart.

use super::{ConfigReader, HfError};

/// Hugging Face's word for the attention of each layer.
pub(crate) fn kinds(has_window: impl Fn(usize) -> bool, layers: usize) -> Vec<&'static str> {
    let kind = |layer| if has_window(layer) { "sliding_attention" } else { "full_attention" };
    (0..layers).map(kind).collect()
}

/// Every how many layers one has no window: by the list of all layers, else by the key, else `default`.
pub(crate) fn window_pattern(config: &ConfigReader, layers: usize, default: usize) -> Result<Option<usize>, HfError> {
    // transformers 5 writes the second next to a list that need not follow it.
    let [pattern, before] = ["sliding_window_pattern", "_sliding_window_pattern"].map(|key| config.optional_size(key));
    let of_key = pattern?.or(before?).unwrap_or(default);
    let of_list = config.texts("layer_types")?.map(|types| types.iter().position(|kind| *kind == "full_attention"));
    let pattern = of_list.map_or(Some(of_key), |first| first.map(|first| first + 1));
    Ok(pattern.filter(|pattern| *pattern <= layers))
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
