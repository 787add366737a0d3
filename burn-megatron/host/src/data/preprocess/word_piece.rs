//! A WordPiece tokenizer as BERT's, trained on the text itself.

use std::collections::{BTreeMap, BTreeSet};

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::normalizers::BertNormalizer;
use tokenizers::pre_tokenizers::bert::BertPreTokenizer;
use tokenizers::{
    AddedToken, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
    Tokenizer, Trainer,
};

use super::LARGEST_BPE;
use super::pretokenize::chunks;
use crate::data::tokenizer_file::word_piece::{Cleaning, SPECIAL, as_json};

/// Entries of the smallest WordPiece vocabulary: the special tokens, and one character as the first of a word and as another.
pub const SMALLEST_WORD_PIECE: usize = SPECIAL.len() + 2;

/// Most characters of the alphabet, as in the trainer of the `tokenizers` library's BERT.
const ALPHABET: usize = 1000;

/// Trains a vocabulary of at most `size` entries for lower-case text. The same text gives the same vocabulary.
pub(super) fn train(texts: impl Iterator<Item = String> + Send, size: usize) -> Result<Tokenizer, String> {
    if !(SMALLEST_WORD_PIECE..=LARGEST_BPE).contains(&size) {
        return Err(format!(
            "a WordPiece vocabulary of {size} entries; at least {SMALLEST_WORD_PIECE}, at most {LARGEST_BPE}; nearest legal: {}",
            size.clamp(SMALLEST_WORD_PIECE, LARGEST_BPE)
        ));
    }
    let mut trainer = BpeTrainer::builder()
        .vocab_size(size)
        .min_frequency(2)
        .show_progress(false)
        .continuing_subword_prefix("##".into())
        .build();
    let mut characters: BTreeMap<char, u64> = BTreeMap::new();
    let words = texts.flat_map(chunks).map(|text| {
        let words = words(&text);
        words.iter().flat_map(|word| word.chars()).for_each(|character| *characters.entry(character).or_default() += 1);
        words.join("\n")
    });
    trainer.feed(words, |words| Ok(words.lines().map(String::from).collect())).map_err(|error| error.to_string())?;

    // The most frequent characters, each also as one that continues a word. The trainer would number the latter as its hash
    // table has the words; what is called special here has its number before.
    let mut frequent: Vec<(char, u64)> = characters.into_iter().collect();
    frequent.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    frequent.truncate(ALPHABET.min((size - SPECIAL.len()) / 2));
    let alphabet: BTreeSet<char> = frequent.into_iter().map(|(character, _)| character).collect();
    let continuing = alphabet.iter().map(|character| format!("##{character}"));
    let first = SPECIAL.map(String::from).into_iter().chain(continuing);
    trainer.special_tokens = first.map(|token| AddedToken::from(token, true)).collect();
    trainer.limit_alphabet = Some(alphabet.len());
    trainer.initial_alphabet = alphabet.into_iter().collect();
    let mut model = BPE::default();
    trainer.train(&mut model).map_err(|error| error.to_string())?;
    let mut tokens: Vec<(u32, String)> = model.get_vocab().into_iter().map(|(token, id)| (id, token)).collect();
    tokens.sort_unstable();
    let tokens: Vec<String> = tokens.into_iter().map(|(_, token)| token).collect();
    let cleaning = Cleaning { lowercase: true, strip_accents: None, chinese: true };
    Tokenizer::from_bytes(as_json(&tokens, cleaning)?.to_string()).map_err(|error| error.to_string())
}

/// The words of a text as the tokenizer will have them. None has a line break.
fn words(text: &str) -> Vec<String> {
    let mut normalized = NormalizedString::from(text);
    BertNormalizer::default().normalize(&mut normalized).expect("BERT's normalizer takes every text");
    let mut words = PreTokenizedString::from(normalized);
    BertPreTokenizer.pre_tokenize(&mut words).expect("BERT's pre-tokenizer takes every text");
    let parts = words.get_splits(OffsetReferential::Normalized, OffsetType::None);
    parts.into_iter().map(|(word, ..)| word.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::preprocess::vocab_size;

    const TEXT: &str = "The unaffable cat, Unaffably: 12 cats sat. Naïve 猫 sat";

    fn trained(size: usize) -> Tokenizer {
        train(std::iter::repeat_n(TEXT.to_string(), 3), size).unwrap()
    }

    #[test]
    fn words_become_pieces_and_the_same_ones_each_time() {
        let tokenizer = trained(90);
        assert_eq!(tokenizer.to_string(false).unwrap(), trained(90).to_string(false).unwrap());
        assert!(vocab_size(&tokenizer) <= 90, "{}", vocab_size(&tokenizer));
        assert_eq!(SPECIAL.map(|token| tokenizer.token_to_id(token)), [0, 1, 2, 3, 4].map(Some));
        let encoding = tokenizer.encode("The Naive CATS sat.", false).unwrap();
        let pieces: String = encoding.get_tokens().join(" ").replace(" ##", "");
        assert_eq!(pieces, "the naive cats sat .");
        assert!(encoding.get_tokens().contains(&"sat".into()), "{:?}", encoding.get_tokens());
        let pair = tokenizer.encode(("sat", "sat"), true).unwrap();
        assert_eq!((pair.get_tokens()[0].as_str(), pair.get_type_ids()), ("[CLS]", &[0, 0, 0, 1, 1][..]));
        assert_eq!(tokenizer.encode("xyz", false).unwrap().get_tokens(), ["[UNK]"]);
    }

    #[test]
    fn a_small_vocabulary_has_the_frequent_characters() {
        let tokenizer = trained(SMALLEST_WORD_PIECE);
        assert_eq!(vocab_size(&tokenizer), SMALLEST_WORD_PIECE);
        assert_eq!((tokenizer.token_to_id("##a"), tokenizer.token_to_id("a")), (Some(5), Some(6)));
        let refused = train(std::iter::empty(), 3).unwrap_err();
        assert!(refused.ends_with("nearest legal: 7"), "{refused}");
    }
}
