//! What the sizes of models mean, under the names that they have in `[model]`.

/// The meaning of a model's sizes. Which of them a model has, and of which kind they are, its family decides.
pub const SIZES: &[(&str, &str)] = &[
    ("variant", "Relative of the family: llama, mistral, qwen3; mixtral, qwen3_moe"),
    ("vocab-size", "Number of tokens; default with a tokenizer made here: its size"),
    ("hidden-size", "Width of the residual stream"),
    ("intermediate-size", "Width of the MLP; of a mixtral's experts"),
    ("num-hidden-layers", "Number of blocks"),
    ("num-attention-heads", "Query heads"),
    ("num-key-value-heads", "Key-value heads; default of a family: as many as query heads"),
    ("head-dim", "Features of a head; default of a family: hidden-size / num-attention-heads"),
    ("max-position-embeddings", "Longest sequence; default of a family: training.seq-length"),
    ("sliding-window", "Positions that one sees, itself included (mistral); none: all before it"),
    ("rope-theta", "Base of the rotary frequencies"),
    ("rope-scaling", "Llama 3.1's or YaRN's stretching of the rotary frequencies: { factor, low-freq-factor, ... }"),
    ("rms-norm-eps", "Epsilon of the norms"),
    ("layer-norm-epsilon", "Epsilon of the norms"),
    ("gelu-tanh", "GPT-2's approximation of GELU"),
    ("bias", "Linear layers have biases"),
    ("attention-bias", "Query, key, value and output projections have biases"),
    ("mlp-bias", "The MLP's linear layers have biases"),
    ("tie-word-embeddings", "The output layer shares the embedding's weight"),
    ("initializer-range", "Standard deviation of random initial weights"),
    ("hidden-dropout", "Share dropped after the embedding and before each residual addition"),
    ("attention-dropout", "Share of the attention weights dropped after the softmax"),
    ("num-experts", "Experts of a layer"),
    ("n-routed-experts", "Experts of a layer"),
    ("n-shared-experts", "Experts beside them that all tokens use"),
    ("num-experts-per-tok", "Experts that a token uses"),
    ("moe-intermediate-size", "Width of an expert"),
    ("norm-topk-prob", "The probabilities of a token's experts sum up to one"),
    ("routed-scaling-factor", "What they are multiplied with in the end"),
    ("n-group", "Groups of neighbouring experts"),
    ("topk-group", "Groups that a token may use"),
    ("decoder-sparse-step", "Every this many layers one has experts, the last of them (qwen3_moe)"),
    ("mlp-only-layers", "Further layers with an MLP in the place of experts (qwen3_moe)"),
    ("first-k-dense-replace", "The first layers, which have an MLP in the place of experts"),
    ("router-aux-loss-coef", "Coefficient of the load-balancing loss of each layer"),
    ("router-balance", "Over which tokens the load is balanced: micro-batch, sequence, global"),
    ("router-z-loss-coef", "Coefficient of the loss of large router logits"),
    ("moe-router-bias-update-rate", "How much a step moves the bias that experts are chosen by"),
    ("moe-capacity", "The most tokens that an expert takes: { factor, policy = probs or position, pad }; none: all"),
    ("moe-dispatcher", "How tokens come to the ranks of their experts: all-to-all, all-gather"),
    ("q-lora-rank", "Features of the queries' latent; none: queries come from the hidden states"),
    ("kv-lora-rank", "Features of the latent of keys and values"),
    ("qk-nope-head-dim", "Features of a query and key head that are not rotated"),
    ("qk-rope-head-dim", "Features of a query and key head that are rotated"),
    ("v-head-dim", "Features of a value head"),
    ("rope-interleave", "Files rotate neighbouring features with each other, not the first half with the second"),
    ("num-nextn-predict-layers", "Modules that predict further tokens"),
    ("mtp-loss-scaling-factor", "Weight of the mean of their losses"),
    ("make-vocab-size-divisible-by", "Every rank's rows of the vocabulary are a multiple of this"),
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
