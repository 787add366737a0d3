//! Layers that are alike.

use super::Decoder;

/// Layers of the same kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// The first layer of the kind.
    pub example: usize,
    /// Number of layers.
    pub count: usize,
    /// The layers have experts.
    pub moe: bool,
    /// The layers have linear attention or Mamba-2.
    pub linear: bool,
    /// The layers have softmax attention.
    pub attention: bool,
    /// The layers have an MLP or experts.
    pub mlp: bool,
}

impl Decoder {
    /// The kinds of layers of the model, those with experts last.
    pub fn layer_kinds(&self) -> Vec<LayerKind> {
        let mut kinds: Vec<LayerKind> = Vec::new();
        for layer in 0..self.layers {
            let (moe, linear) = (self.experts_of(layer).is_some(), self.has_state(layer));
            let (attention, mlp) = (self.has_keys(layer), self.has_mlp(layer));
            let kind = LayerKind { example: layer, count: 1, moe, linear, attention, mlp };
            let alike = |other: &&mut LayerKind| LayerKind { example: layer, count: 1, ..**other } == kind;
            if let Some(known) = kinds.iter_mut().find(alike) { known.count += 1 } else { kinds.push(kind) }
        }
        kinds.sort_by_key(|kind| (kind.moe, kind.linear));
        kinds
    }
}
