//! Loading a tokenizer, or making one from the text itself.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::{Value, json};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::{AddedToken, ModelWrapper, Tokenizer, Trainer};

use super::pretokenize::{PreTokenizer, chunks};
use super::{LARGEST_BPE, PreprocessError, Result, word_piece};
use crate::data::tokenizer_file::{byte_symbol, read_tokenizer};

/// The end-of-document token of tokenizers that are made here.
const END_OF_TEXT: &str = "<|endoftext|>";

/// What known tokenizers call the end of a document, the most specific first.
const END_TOKENS: [&str; 7] = [END_OF_TEXT, "<|end_of_text|>", "<eod>", "<EOD>", "</s>", "<eos>", "<|im_end|>"];

/// Entries of the smallest byte-level BPE: the bytes and the end-of-document token.
pub const SMALLEST_BPE: usize = 257;

/// Where the tokenizer comes from. One that is made here is saved as `{prefix}_tokenizer.json`, which every program of
/// the `tokenizers` family reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// A file that [`read_tokenizer`](crate::data::read_tokenizer) reads.
    File(PathBuf),
    /// A byte-level BPE of this many entries, trained on the input.
    TrainBpe(usize),
    /// A WordPiece vocabulary of this many entries for lower-case text, as BERT's, trained on the input.
    TrainWordPiece(usize),
    /// The characters of the input in code point order, as nanoGPT's Shakespeare example does.
    Characters,
    /// The 256 bytes, each being its own id.
    Bytes,
    /// None: the documents are token ids already.
    None,
}

fn failed(error: impl std::fmt::Display) -> PreprocessError {
    PreprocessError::Tokenizer(error.to_string())
}

impl TokenizerChoice {
    /// Whether the tokenizer comes from the input and is to be saved.
    pub(super) fn is_made_here(&self) -> bool {
        matches!(self, Self::TrainBpe(_) | Self::TrainWordPiece(_) | Self::Characters | Self::Bytes)
    }

    /// Loads or makes the tokenizer from `texts`. `with_eod` adds the end-of-document token to those made here; a BPE
    /// always has it, as its first entry.
    pub(super) fn tokenizer(
        &self,
        texts: impl Iterator<Item = String> + Send,
        with_eod: bool,
    ) -> Result<Option<Tokenizer>> {
        let mut tokenizer = match self {
            Self::None => return Ok(None),
            Self::File(path) if path.is_dir() => {
                return Err(failed(format!("{} is a folder; name its tokenizer.json", path.display())));
            }
            Self::File(path) if !path.exists() => {
                return Err(failed(format!("{} is no file; legal: a tokenizer's file, char, byte", path.display())));
            }
            Self::File(path) => {
                let tokenizer = read_tokenizer(path);
                return tokenizer.map(Some).map_err(|error| failed(format!("{}: {error}", path.display())));
            }
            Self::TrainBpe(vocab_size) => return train_bpe(texts, *vocab_size).map(Some),
            Self::TrainWordPiece(vocab_size) => return word_piece::train(texts, *vocab_size).map(Some).map_err(failed),
            Self::Characters => {
                let mut characters = BTreeSet::new();
                texts.for_each(|text| characters.extend(text.chars()));
                from_symbols(characters, json!(null), json!({"type": "Fuse"}))?
            }
            Self::Bytes => {
                let bytes = json!({
                    "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
                });
                from_symbols((0..=255).map(byte_symbol), bytes.clone(), bytes)?
            }
        };
        if with_eod {
            tokenizer.add_special_tokens(&[AddedToken::from(END_OF_TEXT, true)]);
        }
        Ok(Some(tokenizer))
    }
}

/// The id of the end-of-document token: of `token`, or of the first usual one that the tokenizer has.
pub fn end_of_document(tokenizer: &Tokenizer, token: Option<&str>) -> Option<i64> {
    match token {
        Some(token) => tokenizer.token_to_id(token),
        None => END_TOKENS.iter().find_map(|token| tokenizer.token_to_id(token)),
    }
    .map(i64::from)
}

/// The tokens that [`end_of_document`] looks for, for messages.
pub(super) fn usual_end_tokens() -> String {
    END_TOKENS.join(", ")
}

/// Size of a tokenizer's vocabulary: one more than the highest id.
pub fn vocab_size(tokenizer: &Tokenizer) -> usize {
    tokenizer.get_vocab(true).values().max().map_or(0, |highest| *highest as usize + 1)
}

fn bpe_trainer(size: usize) -> BpeTrainer {
    BpeTrainer::builder()
        .vocab_size(size)
        .min_frequency(2)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build()
}

fn train_bpe(texts: impl Iterator<Item = String> + Send, size: usize) -> Result<Tokenizer> {
    if !(SMALLEST_BPE..=LARGEST_BPE).contains(&size) {
        return Err(failed(format!(
            "a byte-level BPE of {size} entries; at least {SMALLEST_BPE} (256 bytes and {END_OF_TEXT}), at most \
             {LARGEST_BPE}; nearest legal: {}",
            size.clamp(SMALLEST_BPE, LARGEST_BPE)
        )));
    }
    let mut trainer = bpe_trainer(size);
    // What `Tokenizer::train` does, without its offsets into the text.
    let pre_tokenizer = PreTokenizer::gpt2();
    let words = |text: &str| Ok(pre_tokenizer.split(text).map(|word| pre_tokenizer.symbols(word)).collect());
    trainer.feed(texts.flat_map(chunks), words).map_err(failed)?;
    let mut model = BPE::default();
    let special = trainer.train(&mut model).map_err(failed)?;
    let mut tokenizer = Tokenizer::new(ModelWrapper::BPE(model));
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
    tokenizer.with_decoder(Some(ByteLevel::new(false, true, true)));
    tokenizer.add_special_tokens(&special);
    Ok(tokenizer)
}

/// A BPE without merges: every symbol is an entry, in order. Naming an unknown token that does not exist makes other
/// symbols an error; without the name they would be dropped silently.
fn from_symbols(symbols: impl IntoIterator<Item = char>, pre_tokenizer: Value, decoder: Value) -> Result<Tokenizer> {
    let vocab: serde_json::Map<String, Value> =
        symbols.into_iter().enumerate().map(|(id, symbol)| (symbol.to_string(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": "a symbol that is not in the vocabulary",
            "continuing_subword_prefix": null,
            "end_of_word_suffix": null,
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": [],
        },
    });
    Tokenizer::from_bytes(tokenizer.to_string()).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "the cat and the hat\nthe cätt 猫\n";

    fn make(choice: TokenizerChoice, with_eod: bool) -> Tokenizer {
        choice.tokenizer([TEXT.to_owned()].into_iter(), with_eod).unwrap().unwrap()
    }

    fn round_trip(tokenizer: &Tokenizer) -> Vec<u32> {
        let ids = tokenizer.encode_fast(TEXT, false).unwrap().get_ids().to_vec();
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), TEXT);
        ids
    }

    #[test]
    fn bytes_are_their_own_ids() {
        let tokenizer = make(TokenizerChoice::Bytes, true);
        assert_eq!(round_trip(&tokenizer), TEXT.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(end_of_document(&tokenizer, None), Some(256));
        assert_eq!(vocab_size(&tokenizer), 257);
    }

    #[test]
    fn characters_are_numbered_in_order_and_others_are_refused() {
        let tokenizer = make(TokenizerChoice::Characters, false);
        let mut characters: Vec<char> = TEXT.chars().collect();
        characters.sort_unstable();
        characters.dedup();
        let expected: Vec<u32> = TEXT.chars().map(|c| characters.binary_search(&c).unwrap() as u32).collect();
        assert_eq!(round_trip(&tokenizer), expected);
        assert_eq!(vocab_size(&tokenizer), characters.len());
        assert_eq!(end_of_document(&tokenizer, None), None);
        assert!(tokenizer.encode_fast("the dog", false).is_err());
    }

    #[test]
    fn training_without_offsets_changes_nothing() {
        let text = TEXT.repeat(3);
        let mut theirs = Tokenizer::new(ModelWrapper::BPE(BPE::default()));
        theirs.with_pre_tokenizer(Some(ByteLevel::new(false, true, true)));
        theirs.with_decoder(Some(ByteLevel::new(false, true, true)));
        let mut trainer = tokenizers::models::TrainerWrapper::BpeTrainer(bpe_trainer(280));
        theirs.train(&mut trainer, [&text].into_iter()).unwrap();
        let ours = train_bpe([text].into_iter(), 280).unwrap();
        assert_eq!(ours.to_string(false).unwrap(), theirs.to_string(false).unwrap());
    }

    #[test]
    fn trained_bpe_is_the_same_each_time_and_merges() {
        let text = TEXT.repeat(3);
        let train = || train_bpe([text.clone()].into_iter(), 280).unwrap();
        let tokenizer = train();
        assert_eq!(tokenizer.to_string(false).unwrap(), train().to_string(false).unwrap());
        assert!(round_trip(&tokenizer).len() < TEXT.len());
        assert_eq!(end_of_document(&tokenizer, None), Some(0));
    }

    #[test]
    fn sizes_of_a_bpe_that_cannot_be_are_refused_with_one_that_can() {
        for (size, nearest) in [(256, "257"), (1_000_000_000, "1048576"), (usize::MAX / 2, "1048576")] {
            let refused = train_bpe(std::iter::empty(), size).unwrap_err().to_string();
            assert!(refused.contains(&format!("of {size} entries")), "{refused}");
            assert!(refused.ends_with(&format!("nearest legal: {nearest}")), "{refused}");
        }
    }
}
