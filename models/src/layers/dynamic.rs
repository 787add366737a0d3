//! Dynamic NTK scaling: sequences that are longer than the model's context have a larger base of their own, so that the
//! longest wave is stretched by as much as the sequence is too long.
//!
//! fp32 in the order of Hugging Face transformers (`modeling_rope_utils.py`, `_compute_dynamic_ntk_parameters`), as all of
//! [`rope`](super::rope).

use serde::{Deserialize, Serialize};

/// Dynamic NTK scaling of the rotary frequencies. Names are Hugging Face's, where a file has the second among the model's
/// keys as `max_position_embeddings`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "rope_type", rename = "dynamic", deny_unknown_fields)]
pub struct DynamicScaling {
    /// How fast the base grows with the length of a sequence.
    pub factor: f64,
    /// Longest sequence with the frequencies of the base itself.
    pub original_max_position_embeddings: usize,
}

impl DynamicScaling {
    /// The base for sequences of so many positions, more than the context, of which `rotated` features of a head depend:
    /// `θ (f s/L − (f − 1))^(d/(d − 2))`.
    pub(super) fn base(&self, theta: f64, length: usize, rotated: usize) -> f32 {
        let stretch = self.factor as f32 * length as f32 / self.original_max_position_embeddings as f32;
        let exponent = rotated as f64 / (rotated as f64 - 2.0);
        theta as f32 * (stretch - (self.factor - 1.0) as f32).powf(exponent as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::{RopeConfig, RopeScaling};

    /// The last frequency `θ^-((d - 2)/d)` is divided by the stretch, the first one stays.
    #[test]
    fn the_longest_wave_is_stretched() {
        let scaling = DynamicScaling { factor: 2.0, original_max_position_embeddings: 64 };
        let config = RopeConfig { head_dim: 16, theta: 1e4, scaling: Some(RopeScaling::Dynamic(scaling)) };
        let plain = config.frequencies();
        assert_eq!(plain, RopeConfig { scaling: None, ..config }.frequencies());
        assert_eq!(config.frequencies_of(64), None);
        let of_96 = config.frequencies_of(96).unwrap();
        assert_eq!(of_96[0], 1.0);
        // 2 · 96/64 − 1 = 2.
        assert!((of_96[7] / plain[7] - 0.5).abs() < 1e-6, "{} of {}", of_96[7], plain[7]);
    }

    /// `inv_freq` of transformers 5.24 for 40 positions: head size 8, base 10000, factor 4, context 32.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let scaling = DynamicScaling { factor: 4.0, original_max_position_embeddings: 32 };
        let config = RopeConfig { head_dim: 8, theta: 1e4, scaling: Some(RopeScaling::Dynamic(scaling)) };
        assert_eq!(config.frequencies_of(40).unwrap(), [1.0, 0.07937005, 0.006299605, 0.0005]);
    }
}
