//! The bytes that a token stands for, which need not be whole characters.

use std::collections::HashMap;
use std::sync::LazyLock;

use tokenizers::{Decoder, DecoderWrapper, Tokenizer};

use super::tokenizer_file::byte_symbol;

/// The bytes of GPT-2's symbols.
static BYTES: LazyLock<HashMap<char, u8>> = LazyLock::new(|| (0..=255).map(|byte| (byte_symbol(byte), byte)).collect());

/// A symbol that every decoder leaves as it is.
const NEIGHBOUR: &str = "x";

/// The bytes of a token within a text: those of its symbols in a byte-level vocabulary, the byte of SentencePiece's `<0x41>`, else
/// those of its text, with a space that a decoder drops at the beginning of a text. Empty if the tokenizer does not
/// have the token.
pub fn token_bytes(tokenizer: &Tokenizer, token: u32) -> Vec<u8> {
    let Some(symbols) = tokenizer.id_to_token(token) else { return Vec::new() };
    let text = || text_within(tokenizer, token, &symbols).into_bytes();
    if tokenizer.get_added_vocabulary().get_added_tokens_decoder().contains_key(&token) {
        return text();
    }
    let has = |kind: fn(&DecoderWrapper) -> bool| match tokenizer.get_decoder() {
        Some(DecoderWrapper::Sequence(parts)) => parts.get_decoders().iter().any(kind),
        Some(decoder) => kind(decoder),
        None => false,
    };
    let bytes = if has(|decoder| matches!(decoder, DecoderWrapper::ByteLevel(_))) {
        symbols.chars().map(|symbol| BYTES.get(&symbol).copied()).collect::<Option<Vec<u8>>>()
    } else if has(|decoder| matches!(decoder, DecoderWrapper::ByteFallback(_))) {
        let byte = symbols.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        byte.and_then(|byte| u8::from_str_radix(byte, 16).ok()).map(|byte| vec![byte])
    } else {
        None
    };
    bytes.unwrap_or_else(text)
}

/// What a token's symbols add between two others.
fn text_within(tokenizer: &Tokenizer, token: u32, symbols: &str) -> String {
    let alone = || tokenizer.decode(&[token], false).unwrap_or_default();
    let Some(decoder) = tokenizer.get_decoder() else { return alone() };
    let decode =
        |symbols: &[&str]| decoder.decode(symbols.iter().map(ToString::to_string).collect()).unwrap_or_default();
    let (whole, ends) = (decode(&[NEIGHBOUR, symbols, NEIGHBOUR]), decode(&[NEIGHBOUR, NEIGHBOUR]));
    let within = whole.strip_prefix(NEIGHBOUR).zip(ends.strip_prefix(NEIGHBOUR));
    within.and_then(|(whole, end)| whole.strip_suffix(end)).map_or_else(alone, String::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn tokens_within_a_character_have_its_bytes() {
        let vocab: HashMap<String, u32> = (0..=255).map(|byte| (byte_symbol(byte).to_string(), byte.into())).collect();
        let bytes = serde_json::json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
        });
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
            "model": {"type": "BPE", "vocab": vocab, "merges": []}
        });
        let tokenizer: Tokenizer = json.to_string().parse().unwrap();
        let ids = tokenizer.encode("é ☃", false).unwrap();
        let bytes: Vec<u8> = ids.get_ids().iter().flat_map(|id| token_bytes(&tokenizer, *id)).collect();
        assert_eq!(bytes, "é ☃".as_bytes());
        assert!(token_bytes(&tokenizer, u32::MAX).is_empty());
    }

    #[test]
    fn bytes_that_sentencepiece_falls_back_to_are_themselves() {
        let vocab = serde_json::json!([["<unk>", 0.0], ["<0xE2>", -1.0], ["▁a", -2.0]]);
        let decoders = serde_json::json!([
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
        ]);
        let json = serde_json::json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": null, "post_processor": null, "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": true}
        });
        let tokenizer: Tokenizer = json.to_string().parse().unwrap();
        assert_eq!((token_bytes(&tokenizer, 1), token_bytes(&tokenizer, 2)), (vec![0xE2], b" a".to_vec()));
    }

    /// Decoders that drop the space before a text drop that of its first token only.
    #[test]
    fn tokens_keep_their_spaces() {
        let golden =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tokenizers/llama2.model");
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("tokenizer.model");
        std::fs::copy(golden, &model).unwrap();
        let llama = crate::data::read_tokenizer(&model).unwrap();
        let metaspace = |scheme: &str| -> Tokenizer {
            let metaspace =
                serde_json::json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
            let vocab = serde_json::json!([
                ["<unk>", 0.0],
                ["▁", -1.0],
                ["▁a", -2.0],
                ["a", -2.0],
                ["▁▁", -3.0],
                ["s▁x", -3.0]
            ]);
            let json = serde_json::json!({
                "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
                "pre_tokenizer": metaspace, "post_processor": null, "decoder": metaspace,
                "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab}
            });
            json.to_string().parse().unwrap()
        };
        for tokenizer in [llama, metaspace("always"), metaspace("first"), metaspace("never")] {
            let is_text = |(symbols, _): &(String, u32)| !symbols.starts_with('<');
            let mut spaced = 0;
            for (symbols, token) in tokenizer.get_vocab(false).into_iter().filter(is_text) {
                let bytes = token_bytes(&tokenizer, token);
                assert_eq!(String::from_utf8(bytes).unwrap(), symbols.replace('▁', " "), "{symbols}");
                spaced += usize::from(symbols.contains('▁'));
            }
            assert!(spaced > 3);
        }
    }
}
