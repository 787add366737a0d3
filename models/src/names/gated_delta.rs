//! The names of a Gated DeltaNet that other systems share; how they fuse its projections differs.

use super::{Foreign, NameMap};
use crate::layers::GatedDeltaConfig;

/// Adds all but the projections in front: the convolutions of queries, keys and values, which are one of all features,
/// `[features, 1, kernel]`; decay, the norm under their name of it, and the projection behind.
pub(crate) fn without_inputs(map: &mut NameMap, config: &GatedDeltaConfig, ours: &str, theirs: &str, norm: &str) {
    let GatedDeltaConfig { hidden, value_heads, value_dim, kernel, .. } = *config;
    let features = config.features();
    let shape = vec![features.iter().sum(), 1, kernel];
    let mut first = 0;
    for (part, features) in ["q_conv", "k_conv", "v_conv"].into_iter().zip(features) {
        let (name, rows) = (format!("{theirs}.conv1d.weight"), Some(Vec::from([first..first + features])));
        first += features;
        map.add(format!("{ours}.{part}"), Foreign { name, transposed: false, rows, stack: None, shape: shape.clone() });
    }
    for name in ["A_log", "dt_bias"] {
        map.same(format!("{ours}.{name}"), format!("{theirs}.{name}"), &[value_heads]);
    }
    map.same(format!("{ours}.norm.weight"), format!("{theirs}.{norm}.weight"), &[value_dim]);
    map.linear(&format!("{ours}.o_proj"), &format!("{theirs}.out_proj"), [hidden, features[2]], false);
}
