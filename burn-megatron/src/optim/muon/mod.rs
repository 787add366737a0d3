//! Muon: the momentum of a hidden matrix, orthogonalised, is the step
//! (Jordan: <https://kellerjordan.github.io/posts/muon/>; Megatron uses NVIDIA's `emerging_optimizers`, `Muon`).

mod orthogonal;
mod pieces;
mod steps;

pub(super) use pieces::assign_owners;
pub(super) use steps::matrix_steps;

use super::adamw::AdamWConfig;
use serde::{Deserialize, Serialize};

/// Constants of Muon. Embeddings, the output and vectors are updated by AdamW with the same learning rate. Query, key
/// and value are a matrix each, as in Megatron, and so are gate and up, which Megatron has in one; all whole, whatever
/// ranks hold of them (Megatron's `--muon-tp-mode duplicated`). The taps of convolutions, which have three dimensions, are
/// updated by AdamW too.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub struct MuonConfig {
    /// Decay of the momentum, a running mean of gradients.
    pub momentum: f64,
    /// Looks one step ahead: mixes the gradient with the new momentum once more.
    pub nesterov: bool,
    /// Newton-Schulz steps; the five triples of coefficients repeat after five.
    pub ns_steps: usize,
    /// How the size of the step follows from the shape of the matrix.
    pub scale: MuonScale,
    /// Multiplies the step; 0.2 gives steps as large as AdamW's (<https://arxiv.org/abs/2502.16982>).
    pub extra_scale: f64,
    /// Share of a decayed parameter that is removed per step, times the learning rate.
    pub weight_decay: f64,
    /// AdamW: decay of the first moment.
    pub beta1: f64,
    /// AdamW: decay of the second moment.
    pub beta2: f64,
    /// AdamW: added to the root of the second moment.
    pub eps: f64,
    /// AdamW: decay vectors too.
    pub decay_vectors: bool,
}

impl Default for MuonConfig {
    fn default() -> Self {
        let AdamWConfig { beta1, beta2, eps, weight_decay, decay_vectors, .. } = AdamWConfig::default();
        Self {
            momentum: 0.95,
            nesterov: true,
            ns_steps: 5,
            scale: MuonScale::Spectral,
            extra_scale: 1.0,
            weight_decay,
            beta1,
            beta2,
            eps,
            decay_vectors,
        }
    }
}

/// The factor of an orthogonalised step of a matrix of `rows` outputs and `columns` inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MuonScale {
    /// `√max(rows, columns)`
    Spectral,
    /// `√(rows / columns)`
    UnitRms,
    /// `√max(1, rows / columns)`
    ShapeScaling,
}

impl MuonScale {
    fn factor(self, rows: usize, columns: usize) -> f64 {
        let (rows, columns) = (rows as f64, columns as f64);
        match self {
            Self::Spectral => rows.max(columns).sqrt(),
            Self::UnitRms => (rows / columns).sqrt(),
            Self::ShapeScaling => (rows / columns).max(1.0).sqrt(),
        }
    }
}

impl MuonConfig {
    /// The constants of the parameters that are not orthogonalised.
    pub fn adamw(&self) -> AdamWConfig {
        let Self { beta1, beta2, eps, weight_decay, decay_vectors, .. } = *self;
        AdamWConfig { beta1, beta2, eps, weight_decay, decay_vectors, ..AdamWConfig::default() }
    }

    /// The factor of an orthogonalised step of a matrix of this global shape, without the learning rate.
    pub fn step_factor(&self, rows: usize, columns: usize) -> f64 {
        self.scale.factor(rows, columns) * self.extra_scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_scale_with_the_shape() {
        let factor = |scale, rows, columns| MuonConfig { scale, ..MuonConfig::default() }.step_factor(rows, columns);
        assert_eq!([factor(MuonScale::Spectral, 4, 16), factor(MuonScale::Spectral, 16, 4)], [4.0, 4.0]);
        assert_eq!([factor(MuonScale::UnitRms, 4, 16), factor(MuonScale::UnitRms, 16, 4)], [0.5, 2.0]);
        assert_eq!([factor(MuonScale::ShapeScaling, 4, 16), factor(MuonScale::ShapeScaling, 16, 4)], [1.0, 2.0]);
        assert_eq!(MuonConfig { extra_scale: 0.2, ..MuonConfig::default() }.step_factor(4, 25), 1.0);
    }
}
