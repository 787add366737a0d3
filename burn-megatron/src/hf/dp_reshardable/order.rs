//! In which order Megatron-Core's modules register their parameters.

use crate::hf::torch_dist::expert;

/// Which of Megatron-Core's layers a model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// TransformerEngine's, whose linear layers have the norms before them, and not Megatron-Core's own.
    pub engine: bool,
    /// The experts of a rank are one grouped GEMM: the first matrices of all, then the second ones.
    pub grouped: bool,
}

impl Order {
    /// All of them.
    pub const ALL: [Self; 4] = [
        Self { engine: false, grouped: false },
        Self { engine: false, grouped: true },
        Self { engine: true, grouped: false },
        Self { engine: true, grouped: true },
    ];

    /// The modules of a layer. Latent attention has a norm of its own before it in both.
    fn layer(self, is_latent: bool) -> Vec<&'static str> {
        let attention = match (self.engine, is_latent) {
            (false, _) => {
                "input_layernorm self_attention.core_attention self_attention.linear_proj self_attention.linear_qkv \
                 self_attention.linear_q_proj self_attention.linear_q_down_proj self_attention.linear_q_up_proj \
                 self_attention.linear_kv_down_proj self_attention.linear_kv_up_proj self_attention.q_layernorm \
                 self_attention.k_layernorm self_attention.kv_layernorm"
            }
            (true, false) => {
                "self_attention.core_attention self_attention.linear_proj input_layernorm self_attention.linear_qkv \
                 self_attention.q_layernorm self_attention.k_layernorm"
            }
            (true, true) => {
                "input_layernorm self_attention.linear_proj self_attention.linear_q_proj \
                 self_attention.linear_q_down_proj self_attention.q_layernorm self_attention.linear_q_up_proj \
                 self_attention.linear_kv_down_proj self_attention.kv_layernorm self_attention.linear_kv_up_proj"
            }
        };
        let mlp = "pre_mlp_layernorm mlp.linear_fc1 mlp.linear_fc2 mlp.router mlp.experts mlp.shared_experts \
                   mlp.shared_experts.linear_fc1 mlp.shared_experts.linear_fc2";
        attention.split_whitespace().chain(mlp.split_whitespace()).collect()
    }
}

/// The names of weights from the last to the first parameter of Megatron-Core's model; `None` if one has no known place.
pub(super) fn ordered<'a>(names: impl Iterator<Item = &'a str> + Clone, order: Order) -> Option<Vec<&'a str>> {
    let layer = order.layer(names.clone().any(|name| name.contains(".linear_kv_up_proj.")));
    let mut places = names.map(|name| Some((place(name, order, &layer)?, name))).collect::<Option<Vec<_>>>()?;
    places.sort_unstable_by(|a, b| b.cmp(a));
    Some(places.into_iter().map(|(_, name)| name).collect())
}

/// Where a parameter is registered: numbers that are compared from the first to the last.
fn place(name: &str, order: Order, layer: &[&str]) -> Option<[usize; 7]> {
    const PARTS: [&str; 6] = [
        "embedding.word_embeddings",
        "embedding.position_embeddings",
        "",
        "decoder.final_layernorm",
        "",
        "output_layer",
    ];
    const PREDICTOR: [&str; 5] = ["enorm", "hnorm", "eh_proj", "transformer_layer", "final_layernorm"];
    let index = |of: &[&str], module: &str| of.iter().position(|it| *it == module);
    let (module, kind) = name.rsplit_once('.')?;
    let kind = index(&["weight", "bias", "gate_weight", "softmax_offset"], kind)?;
    let in_layer = |module: &str| match expert(name) {
        Some((expert, matrix)) => {
            let matrix = index(&["linear_fc1", "linear_fc2"], matrix.rsplit_once('.')?.0)?;
            let [first, second] = if order.grouped { [matrix, expert] } else { [expert, matrix] };
            Some([index(layer, "mlp.experts")?, first, second])
        }
        None => Some([index(layer, module)?, 0, 0]),
    };
    if let Some(rest) = module.strip_prefix("decoder.layers.") {
        let (number, module) = rest.split_once('.')?;
        let [at, first, second] = in_layer(module)?;
        return Some([2, number.parse().ok()?, 0, at, first, second, kind]);
    }
    if let Some(rest) = module.strip_prefix("mtp.layers.") {
        let (number, rest) = rest.split_once('.')?;
        let (part, module) = rest.split_once('.').unwrap_or((rest, ""));
        let [at, first, second] = if module.is_empty() { [0; 3] } else { in_layer(module)? };
        return Some([4, number.parse().ok()?, index(&PREDICTOR, part)?, at, first, second, kind]);
    }
    Some([index(&PARTS, module)?, 0, 0, 0, 0, 0, kind])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(names: &[&'static str], engine: bool, grouped: bool) -> Option<Vec<&'static str>> {
        let names = ordered(names.iter().copied(), Order { engine, grouped })?;
        Some(
            names
                .into_iter()
                .map(|name| name.trim_start_matches("decoder.layers.").trim_end_matches(".weight"))
                .collect(),
        )
    }

    #[test]
    fn parameters_go_from_the_last_to_the_first() {
        let names = [
            "embedding.word_embeddings.weight",
            "decoder.layers.10.input_layernorm.weight",
            "decoder.layers.10.self_attention.linear_proj.weight",
            "decoder.layers.2.self_attention.linear_qkv.weight",
            "decoder.final_layernorm.weight",
        ];
        let ends = ["decoder.final_layernorm", "2.self_attention.linear_qkv", "embedding.word_embeddings"];
        for (engine, norm) in [
            (false, ["10.self_attention.linear_proj", "10.input_layernorm"]),
            (true, ["10.input_layernorm", "10.self_attention.linear_proj"]),
        ] {
            assert_eq!(order(&names, engine, false).unwrap(), [&ends[..1], &norm, &ends[1..]].concat(), "{engine}");
        }
        assert_eq!(order(&["decoder.layers.0.mlp.unknown.weight"], false, false), None);
    }

    #[test]
    fn experts_are_matrix_by_matrix_or_one_after_the_other() {
        let names = [
            "decoder.layers.0.mlp.router.weight",
            "decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight",
            "decoder.layers.0.mlp.experts.local_experts.2.linear_fc2.weight",
            "decoder.layers.0.mlp.experts.local_experts.10.linear_fc1.weight",
            "decoder.layers.0.mlp.experts.local_experts.10.linear_fc2.weight",
            "decoder.layers.0.mlp.shared_experts.gate_weight",
        ];
        let of = |grouped| {
            let names = order(&names, true, grouped).unwrap().into_iter();
            names.map(|name| name.replace("0.mlp.experts.local_experts.", "")).collect::<Vec<_>>()
        };
        let [first, last] = ["0.mlp.shared_experts.gate_weight", "0.mlp.router"];
        assert_eq!(of(false), [first, "10.linear_fc2", "10.linear_fc1", "2.linear_fc2", "2.linear_fc1", last]);
        assert_eq!(of(true), [first, "10.linear_fc2", "2.linear_fc2", "10.linear_fc1", "2.linear_fc1", last]);
    }
}
