//! Which linear layers multiply in FP8, and how: Megatron-LM's `--fp8-format`, `--fp8-recipe`, `--fp8-margin`,
//! `--fp8-amax-history-len`, `--fp8-amax-compute-algo`, `--first-last-layers-bf16` and the numbers of layers that go
//! with it.

use std::ops::Range;

use backend_dist::ops::fp8::{AmaxAlgorithm, Fp8Format, Fp8Recipe, Fp8Scaling};
use serde::{Deserialize, Serialize};

/// FP8 in a model's blocks: the query, key and value projection, the attention's output projection and both layers of
/// the MLP or of every expert. Embedding and output layer stay as they are. The default is none.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct Fp8Config {
    /// The number format; `None` is no FP8.
    pub format: Option<Fp8Format>,
    /// Where scales come from.
    pub recipe: Fp8Scaling,
    /// The amax becomes the format's largest number divided by `2^margin`.
    pub margin: u32,
    /// Steps that delayed scaling looks back.
    pub amax_history_len: usize,
    /// Which amax of these steps counts.
    pub amax_compute_algo: AmaxAlgorithm,
    /// Quantised weights are cached for a whole step, not quantised again by every micro-batch.
    pub keep_weights: bool,
    /// Routed experts too.
    pub experts: bool,
    /// The first and last layers stay out.
    pub first_last_layers_bf16: bool,
    /// How many at the start.
    pub num_layers_at_start_in_bf16: usize,
    /// How many at the end.
    pub num_layers_at_end_in_bf16: usize,
}

impl Default for Fp8Config {
    fn default() -> Self {
        Self {
            format: None,
            recipe: Fp8Scaling::Tensorwise,
            margin: 0,
            amax_history_len: 1,
            amax_compute_algo: AmaxAlgorithm::MostRecent,
            keep_weights: true,
            experts: true,
            first_last_layers_bf16: false,
            num_layers_at_start_in_bf16: 1,
            num_layers_at_end_in_bf16: 1,
        }
    }
}

impl Fp8Config {
    /// The recipe of the layers that are in FP8.
    pub fn recipe(&self) -> Option<Fp8Recipe> {
        self.format.map(|format| Fp8Recipe {
            format,
            scaling: self.recipe,
            margin: self.margin,
            amax_history_len: self.amax_history_len.max(1),
            amax_compute_algo: self.amax_compute_algo,
        })
    }

    /// The layers in FP8 of a model of `layers`, counted over the whole model.
    pub fn layers(&self, layers: usize) -> Range<usize> {
        match (self.format, self.first_last_layers_bf16) {
            (None, _) => 0..0,
            (Some(_), false) => 0..layers,
            (Some(_), true) => {
                let end = layers.saturating_sub(self.num_layers_at_end_in_bf16);
                self.num_layers_at_start_in_bf16.min(end)..end
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_and_last_layers_stay_out() {
        let hybrid = Fp8Config { format: Some(Fp8Format::Hybrid), ..Fp8Config::default() };
        assert_eq!(Fp8Config::default().layers(8), 0..0);
        assert_eq!(hybrid.layers(8), 0..8);
        let ends = Fp8Config { first_last_layers_bf16: true, num_layers_at_end_in_bf16: 2, ..hybrid };
        assert_eq!(ends.layers(8), 1..6);
        assert_eq!(ends.layers(2), 0..0);
    }
}
