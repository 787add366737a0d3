//! Which parameters weight decay applies to (megatron/core/optimizer/__init__.py).

/// Whether the tensor `name` with `rank` dimensions is decayed: not when it is one-dimensional (norm weights) or a bias.
pub fn decays(name: &str, rank: usize) -> bool {
    rank > 1 && !(name == "bias" || name.ends_with(".bias"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_and_biases_are_not_decayed() {
        assert!(decays("layers.0.attention.q_proj.weight", 2));
        assert!(decays("embed_tokens.weight", 2));
        assert!(!decays("layers.0.attention.q_proj.bias", 1));
        assert!(!decays("stacked.bias", 2));
        assert!(!decays("layers.0.input_norm.weight", 1));
    }
}
