//! Names of families whose layers are a norm and a `mixer` each: transformers' Mamba-2, and NVIDIA's hybrids.

use super::decoder::{MLP, USUAL, attention, dense, gated_delta, map_moe};
use crate::frame::Frame;
use crate::layers::{BlockConfig, Ffn, Mixer, Vocab};
use crate::names::{NameMap, latent, mamba2};

/// The tensors of such a decoder; `block` says what each layer is.
pub(crate) fn names(frame: &Frame, block: impl Fn(usize) -> BlockConfig) -> NameMap {
    let (mut map, Vocab { size, hidden, .. }) = (NameMap::default(), frame.vocab);
    map.same("embed_tokens.weight", "backbone.embeddings.weight", &[size, hidden]);
    for layer in 0..frame.layers {
        let (ours, theirs, block) = (format!("layers.{layer}"), format!("backbone.layers.{layer}"), block(layer));
        for (_, norm) in block.norms() {
            map.same(format!("{ours}.{norm}.weight"), format!("{theirs}.norm.weight"), &[hidden]);
        }
        let theirs = format!("{theirs}.mixer");
        if let Some(mixer) = &block.mixer {
            let ours = format!("{ours}.{}", mixer.name());
            match mixer {
                Mixer::Attention(of) => attention(&mut map, of, &ours, &theirs, USUAL),
                Mixer::Latent(of) => latent(&mut map, of, &ours, &theirs, |part| part),
                Mixer::GatedDelta(of) => gated_delta(&mut map, of, &ours, &theirs),
                Mixer::Mamba2(of) => mamba2(&mut map, of, &ours, &theirs),
            }
        }
        match &block.mlp {
            Some(Ffn::Dense(of)) => dense(&mut map, of, &format!("{ours}.mlp"), &theirs),
            Some(Ffn::Moe(of)) => map_moe(&mut map, of, &format!("{ours}.mlp"), &theirs, MLP),
            None => {}
        }
    }
    map.same("norm.weight", "backbone.norm_f.weight", &[hidden]);
    if !frame.tied {
        map.same("lm_head.weight", "lm_head.weight", &[size, hidden]);
    }
    map
}
