//! Which layers of a decoder are of another kind than the others.

use serde::{Deserialize, Serialize};

use crate::config::{ConfigError, expect, positive};

/// Some layers of a decoder. Megatron-Core takes a number or a list too (`window_attn_skip_freq`, `no_rope_freq`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "a number of layers of which the last one is meant, or a list of layers, the first is 0")]
pub enum LayerPattern {
    /// The last of every so many.
    Every(usize),
    /// These, counted from 0.
    At(Vec<usize>),
}

impl LayerPattern {
    /// Whether a layer is one of them.
    pub fn has(&self, layer: usize) -> bool {
        match self {
            Self::Every(count) => (layer + 1).is_multiple_of(*count),
            Self::At(layers) => layers.contains(&layer),
        }
    }

    /// Those of `layers` layers of which `is_one` is true: by a number if there is one. `None` if there are none.
    pub fn of(layers: usize, is_one: impl Fn(usize) -> bool) -> Option<Self> {
        let at: Vec<usize> = (0..layers).filter(|layer| is_one(*layer)).collect();
        let every = Self::Every(at.first()? + 1);
        Some(if (0..layers).all(|layer| every.has(layer) == is_one(layer)) { every } else { Self::At(at) })
    }

    /// The window of a layer of a model with one in all layers but some.
    pub(crate) fn window(window: Option<usize>, without: Option<&Self>, layer: usize) -> Option<usize> {
        window.filter(|_| !without.is_some_and(|without| without.has(layer)))
    }

    /// Whether a model of so many layers has them.
    pub(crate) fn check(pattern: Option<&Self>, key: &'static str, layers: usize) -> Result<(), ConfigError> {
        match pattern {
            None => Ok(()),
            Some(Self::Every(count)) => positive(&[(key, *count)]),
            Some(Self::At(at)) => at.iter().try_for_each(|&layer| {
                expect(layer < layers, (key, layer as f64), "below num_hidden_layers", layers as f64 - 1.0)
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_form_is_found() {
        let of = |layers: &[bool]| LayerPattern::of(layers.len(), |layer| layers[layer]);
        assert_eq!(of(&[false, true, false, true, false]), Some(LayerPattern::Every(2)));
        assert_eq!(of(&[false, true, true, false]), Some(LayerPattern::At(vec![1, 2])));
        assert_eq!(of(&[true, true]), Some(LayerPattern::Every(1)));
        assert_eq!(of(&[false, false]), None);
    }

    #[test]
    fn files_have_a_number_or_a_list() {
        let read = |text: &str| serde_json::from_str::<LayerPattern>(text).map_err(|error| error.to_string());
        assert_eq!(read("6"), Ok(LayerPattern::Every(6)));
        assert_eq!(read("[0, 5]"), Ok(LayerPattern::At(vec![0, 5])));
        assert!(read("\"6\"").unwrap_err().contains("a list of layers"));
    }

    #[test]
    fn layers_that_are_not_there_are_named() {
        let check = |pattern| LayerPattern::check(Some(&pattern), "sliding_window_pattern", 4);
        assert_eq!(check(LayerPattern::At(vec![0, 3])), Ok(()));
        let said = check(LayerPattern::At(vec![4])).unwrap_err().to_string();
        assert_eq!(said, "sliding_window_pattern = 4 is not below num_hidden_layers; nearest legal: 3");
        assert!(check(LayerPattern::Every(0)).is_err());
    }
}
