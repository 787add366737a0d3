//! Published sizes of encoders.

use serde_json::Value;

use super::{Bert, BertConfig, T5, T5Config};
use crate::hf::HfModule;

/// Names of published models, and the `config.json` of their sizes: BERT base and large (arXiv:1810.04805, section 3), the
/// five T5 (arXiv:1910.10683, section 3.7).
///
/// ```
/// let presets = models::encoders::presets();
/// let (_, large) = presets.iter().find(|(name, _)| *name == "bert-large").expect("it is one of them");
/// assert_eq!((&large["model_type"], &large["num_hidden_layers"]), (&"bert".into(), &24.into()));
/// ```
pub fn presets() -> [(&'static str, Value); 7] {
    let (bert, t5) = (BertConfig::base(), T5Config::small());
    let bert_large = BertConfig { hidden_size: 1024, num_hidden_layers: 24, ..bert.clone() };
    let bert_large = BertConfig { num_attention_heads: 16, intermediate_size: 4096, ..bert_large };
    let of_t5 = |d_model, d_ff, layers, num_heads, d_kv| {
        let sizes = T5Config { d_model, d_ff, num_heads, d_kv, ..t5.clone() };
        T5::to_hf(&T5Config { num_layers: layers, num_decoder_layers: layers, ..sizes })
    };
    [
        ("bert-base", Bert::to_hf(&bert)),
        ("bert-large", Bert::to_hf(&bert_large)),
        ("t5-small", of_t5(512, 2048, 6, 8, 64)),
        ("t5-base", of_t5(768, 3072, 12, 12, 64)),
        ("t5-large", of_t5(1024, 4096, 24, 16, 64)),
        ("t5-3b", of_t5(1024, 16_384, 24, 32, 128)),
        ("t5-11b", of_t5(1024, 65_536, 24, 128, 128)),
    ]
}
