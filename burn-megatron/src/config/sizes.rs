//! The sizes of models, under the names that they have in `[model]`.

/// The meaning of a model's sizes. Which of them a model has, and of which kind they are, its family decides.
pub const SIZES: &[(&str, &str)] = &[
    (
        "variant",
        "Variant of the family: llama, mistral, qwen2, qwen3, smollm3, olmo2, gemma2, gemma3, phi3 or glm4; mixtral, qwen2_moe, qwen3_moe, qwen3_next, glm4_moe or gpt_oss",
    ),
    ("vocab-size", "Vocabulary size; default with a tokenizer that is made from the text: its size"),
    ("hidden-size", "Hidden size"),
    ("intermediate-size", "Intermediate size of the MLP; of each expert in mixtral"),
    ("num-hidden-layers", "Number of transformer layers"),
    ("num-attention-heads", "Number of query heads"),
    ("num-key-value-heads", "Number of key-value heads; default of a family: num-attention-heads"),
    ("head-dim", "Head dimension; default of a family: hidden-size / num-attention-heads"),
    ("num-heads", "Mamba-2: number of heads"),
    (
        "hybrid-override-pattern",
        "Layers, a character each: M (Mamba-2), * (attention), - (MLP), E (experts) (nemotron_h)",
    ),
    ("mamba-num-heads", "Mamba-2: number of heads (nemotron_h)"),
    ("mamba-head-dim", "Mamba-2: head dimension (nemotron_h)"),
    ("ssm-state-size", "Mamba-2: state dimension, the features of B and of C in a group (nemotron_h)"),
    ("state-size", "Mamba-2: state dimension, the features of B and of C in a group"),
    ("n-groups", "Mamba-2: number of groups of heads that share B and C, and that the output is normalised in"),
    ("conv-kernel", "Mamba-2: positions that the convolution sees"),
    ("use-conv-bias", "Mamba-2: use a bias in the convolution"),
    ("use-bias", "Mamba-2: use biases in the projections"),
    ("time-step-limit-min", "Mamba-2: smallest step size"),
    ("time-step-limit-max", "Mamba-2: largest step size; none: no limit"),
    ("max-position-embeddings", "Maximum sequence length; default of a family: training.seq-length"),
    (
        "sliding-window",
        "Size of the sliding attention window, the current position included (mistral, gemma2, gemma3, phi3, qwen2, qwen3, smollm3, mixtral, gpt_oss, qwen2_moe, qwen3_moe); none: full causal attention",
    ),
    (
        "sliding-window-pattern",
        "Layers with full attention instead of the window: the last of every so many, or a list such as [0, 5] (families with a window but mistral, phi3, qwen3_moe)",
    ),
    ("no-rope-layer-interval", "Layers without RoPE: the last of every so many, or a list (smollm3)"),
    ("partial-rotary-factor", "Fraction of the head dimension that has RoPE (phi3, glm4, qwen3_next, glm4_moe)"),
    ("rope-local-base-freq", "RoPE base of the layers with a sliding window (gemma3)"),
    (
        "full-attention-interval",
        "Layers with attention, the others have Gated DeltaNet: the last of every so many, or a list (qwen3_next); none: 4",
    ),
    ("linear-num-key-heads", "Gated DeltaNet: number of query and key heads (qwen3_next); none: 16"),
    ("linear-num-value-heads", "Gated DeltaNet: number of value heads (qwen3_next); none: 32"),
    ("linear-key-head-dim", "Gated DeltaNet: query and key head dimension (qwen3_next); none: 128"),
    ("linear-value-head-dim", "Gated DeltaNet: value head dimension (qwen3_next); none: 128"),
    ("linear-conv-kernel-dim", "Gated DeltaNet: positions that the convolution sees (qwen3_next); none: 4"),
    ("swiglu-limit", "Limit of the clamped SwiGLU of experts (gpt_oss); none: 7"),
    ("query-pre-attn-scalar", "Attention scores are divided by its square root (gemma2, gemma3); none: head-dim"),
    (
        "attn-logit-softcapping",
        "Softcap of the attention scores (gemma2); no GPU kernel has it, so attention is slower there",
    ),
    ("final-logit-softcapping", "Softcap of the output logits (gemma2)"),
    ("rope-theta", "RoPE base"),
    (
        "rope-scaling",
        "RoPE scaling, by rope_type: linear, dynamic, llama3, yarn or longrope: { rope_type, factor, ... }",
    ),
    ("rms-norm-eps", "Epsilon of RMSNorm"),
    ("layer-norm-epsilon", "Epsilon of LayerNorm; of RMSNorm in mamba2 and nemotron_h"),
    ("gelu-tanh", "Use the tanh approximation of GELU, as GPT-2 does"),
    ("bias", "Use biases in the linear layers"),
    ("attention-bias", "Use biases in the query, key, value and output projections"),
    ("use-qk-norm", "Normalise every query and key head before RoPE (glm4_moe)"),
    ("mlp-bias", "Use biases in the MLP"),
    ("tie-word-embeddings", "Share the weight of the embedding with the output layer"),
    ("initializer-range", "Standard deviation of the random initial weights"),
    ("hidden-dropout", "Dropout after the embedding and before each residual addition"),
    ("attention-dropout", "Dropout of the attention probabilities"),
    ("num-experts", "Number of routed experts of a layer"),
    ("n-routed-experts", "Number of routed experts of a layer"),
    ("n-shared-experts", "Number of shared experts of a layer, which every token uses"),
    ("num-experts-per-tok", "Routed experts per token (top-k)"),
    ("moe-intermediate-size", "Intermediate size of an expert"),
    ("moe-shared-expert-intermediate-size", "Intermediate size of the shared expert (nemotron_h)"),
    (
        "shared-expert-intermediate-size",
        "Intermediate size of the shared expert (qwen2_moe, qwen3_next, glm4_moe); none: intermediate-size, in glm4_moe moe-intermediate-size",
    ),
    ("norm-topk-prob", "Normalise the top-k probabilities of a token to a sum of one"),
    ("routed-scaling-factor", "Factor of the top-k probabilities"),
    ("n-group", "Number of expert groups (group-limited routing)"),
    ("topk-group", "Expert groups per token (group-limited routing)"),
    ("decoder-sparse-step", "Every so many layers, one layer has experts (qwen2_moe, qwen3_moe, qwen3_next)"),
    (
        "mlp-only-layers",
        "Indices of further layers with a dense MLP instead of experts (qwen2_moe, qwen3_moe, qwen3_next)",
    ),
    ("first-k-dense-replace", "Number of first layers with a dense MLP instead of experts"),
    ("router-aux-loss-coef", "Coefficient of the load-balancing (auxiliary) loss"),
    ("router-balance", "Tokens over which the load-balancing loss is computed: micro-batch, sequence, global"),
    ("router-z-loss-coef", "Coefficient of the router z-loss"),
    ("moe-router-bias-update-rate", "Update rate of the expert bias (auxiliary-loss-free load balancing)"),
    ("moe-capacity", "Expert capacity: { factor, policy = probs or position, pad }; none: dropless"),
    ("moe-dispatcher", "Token dispatcher: all-to-all, all-gather"),
    ("q-lora-rank", "MLA: rank of the query latent; none: queries are projected from the hidden states"),
    ("kv-lora-rank", "MLA: rank of the key-value latent"),
    ("qk-nope-head-dim", "MLA: query and key head dimension without RoPE"),
    ("qk-rope-head-dim", "MLA: query and key head dimension with RoPE"),
    ("v-head-dim", "MLA: value head dimension"),
    ("rope-interleave", "Hugging Face files interleave the RoPE dimensions instead of splitting them in halves"),
    ("num-nextn-predict-layers", "Number of multi-token prediction (MTP) modules"),
    ("mtp-loss-scaling-factor", "Weight of the mean MTP loss"),
    (
        "make-vocab-size-divisible-by",
        "Vocabulary padding: the shard of every tensor-parallel rank is a multiple of this",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_of_every_family_has_a_meaning() {
        let names = super::super::size_names();
        for (name, _) in SIZES {
            assert!(names.iter().any(|known| known == name), "{name} is no size");
        }
        assert_eq!(names.len(), SIZES.len(), "{names:?}");
    }
}
