//! The names of a Mamba-2 layer, which Hugging Face and Megatron-Core share.

use super::{Foreign, NameMap};
use crate::layers::Mamba2MixerConfig;

/// transformers' `Mamba2Mixer` and Megatron-Core's `ssm/mamba_mixer.py`: one projection `[z; x; B; C; Δ]`, one convolution
/// of all features of x, B and C, `[features, 1, kernel]`.
pub(crate) fn mamba2(map: &mut NameMap, config: &Mamba2MixerConfig, ours: &str, theirs: &str) {
    let Mamba2MixerConfig { hidden, heads, kernel, conv_bias, input, output, .. } = *config;
    let (parts, mut first) = (config.projected(), 0);
    let height = parts.iter().map(|(_, features)| features).sum();
    for (part, features) in parts {
        let rows = Vec::from([first..first + features]);
        map.linear_rows(
            &format!("{ours}.{part}_proj"),
            &format!("{theirs}.in_proj"),
            rows,
            [height, hidden],
            input.bias,
        );
        first += features;
    }
    let (parts, mut first) = (config.convolved(), 0);
    let all: usize = parts.iter().map(|(_, features)| features).sum();
    for (part, features) in parts {
        let mut add = |ours: String, theirs: String, shape: &[usize]| {
            let rows = Some(Vec::from([first..first + features]));
            map.add(ours, Foreign { name: theirs, transposed: false, rows, stack: None, shape: shape.to_vec() });
        };
        add(format!("{ours}.{part}_conv"), format!("{theirs}.conv1d.weight"), &[all, 1, kernel]);
        if conv_bias {
            add(format!("{ours}.{part}_conv_bias"), format!("{theirs}.conv1d.bias"), &[all]);
        }
        first += features;
    }
    for name in ["dt_bias", "A_log", "D"] {
        map.same(format!("{ours}.{name}"), format!("{theirs}.{name}"), &[heads]);
    }
    map.same(format!("{ours}.norm.weight"), format!("{theirs}.norm.weight"), &[config.inner()]);
    map.linear(&format!("{ours}.out_proj"), &format!("{theirs}.out_proj"), [hidden, config.inner()], output.bias);
}
