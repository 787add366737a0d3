//! Tokenizers in the files in which models are published: `tokenizer.json`, SentencePiece's `.model`, tiktoken's ranks, and
//! BERT's `vocab.txt`.
//! All become a tokenizer of the `tokenizers` crate, told by what is in the file and not by its name: Llama 2 and Llama 3
//! both come with a `tokenizer.model`, and one is SentencePiece's, the other tiktoken's.

mod added_token;
mod byte_symbol;
mod charsmap;
mod config;
mod sentencepiece;
mod tiktoken;
mod wire;
pub(in crate::data) mod word_piece;

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::Tokenizer;

use config::{Config, End};

pub(in crate::data) use byte_symbol::byte_symbol;

/// Names of a tokenizer in a folder, the first that is there counts.
const NAMES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "tokenizer.tiktoken",
    "vocab.txt",
];

/// What is wrong with a tokenizer's file; who reads it names it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TokenizerFileError(String);

/// The file of a folder that has its tokenizer.
pub fn find_tokenizer(folder: &Path) -> Option<PathBuf> {
    NAMES.iter().map(|name| folder.join(name)).find(|path| path.is_file())
}

/// The file of a folder that has its tokenizer, or that it should have.
pub fn tokenizer_path(folder: &Path) -> PathBuf {
    find_tokenizer(folder).unwrap_or_else(|| folder.join(NAMES[0]))
}

/// The file of a folder that has its tokenizer, for who can do without one that is in a form that is not read. A
/// `tokenizer.json` always counts: who reads it says what is wrong with it.
///
/// # Errors
/// The file, and what is wrong with it.
pub fn readable_tokenizer(folder: &Path) -> Result<Option<PathBuf>, TokenizerFileError> {
    let Some(path) = find_tokenizer(folder) else { return Ok(None) };
    match read_tokenizer(&path) {
        Err(error) if !path.ends_with(NAMES[0]) => Err(TokenizerFileError(format!("{}: {error}", path.display()))),
        _ => Ok(Some(path)),
    }
}

/// Reads a `tokenizer.json`, a SentencePiece model (unigram or BPE), tiktoken's ranks, or BERT's `vocab.txt`, whose text is
/// lower-case if `tokenizer_config.json` says so (`do_lower_case`), or else if no token has a capital letter.
///
/// Texts are of any length: what a `tokenizer.json` says of truncation and padding is left out.
///
/// Control symbols of a SentencePiece model become special tokens, which are found in a text, as in `tokenizer.json`
/// files; SentencePiece itself never finds them. Special tokens of tiktoken's ranks are those of Llama 3, Qwen or
/// `cl100k_base`, told by the number of ranks, or those that `tokenizer_config.json` next to the file lists; ids between
/// them that nobody lists become `<|reserved_token_N|>`. Fewer than 100000 ranks are read as Llama 3 reads its own, and
/// larger numbers that are not known are refused.
///
/// Special tokens around a text (`encode` with `add_special_tokens`) are those of `add_bos_token`, `add_eos_token`,
/// `bos_token` and `eos_token` in that `tokenizer_config.json`. What it does not say is as in the models known by the file:
/// Llama 3's ranks and a SentencePiece `tokenizer.model` (Llama 2, Mistral, Gemma) have the first token in front, T5's
/// `spiece.model` has `</s>` behind, and others have none. T5's `<extra_id_N>` come from that file too: as many as its
/// `extra_ids`, or 100 if its class is `T5Tokenizer`. Other tokens that it adds to a SentencePiece model are those of its
/// `added_tokens_decoder`, or of an `added_tokens.json` of old. With `"legacy": false` only a text's beginning has
/// SentencePiece's dummy prefix, not what follows such a token.
///
/// ```
/// # let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/tokenizers");
/// let path = std::path::Path::new(golden).join("letters.tiktoken");
/// let tokenizer = host::data::read_tokenizer(&path)?;
/// let encoding = tokenizer.encode("Hello<|end|>", false).unwrap();
/// assert_eq!(encoding.get_ids().last(), Some(&481));
/// assert_eq!(tokenizer.decode(encoding.get_ids(), true).unwrap(), "Hello");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Says what the file is if that can be told, and what is read.
pub fn read_tokenizer(path: &Path) -> Result<Tokenizer, TokenizerFileError> {
    let failed = TokenizerFileError;
    let bytes = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let mut tokenizer = match Kind::of(&bytes) {
        Ok(Kind::Json) => Tokenizer::from_bytes(&bytes).map_err(|error| failed(error.to_string()))?,
        Ok(kind) => converted(path, kind, &bytes).map_err(failed)?,
        Err(what) => {
            return Err(failed(format!(
                "{what}; a tokenizer.json, a SentencePiece model (unigram or BPE) and tiktoken ranks are read, and BERT's vocab.txt"
            )));
        }
    };
    tokenizer.with_truncation(None).map_err(|error| failed(error.to_string()))?.with_padding(None);
    Ok(tokenizer)
}

/// A SentencePiece model, tiktoken's ranks or BERT's vocabulary.
fn converted(path: &Path, kind: Kind, bytes: &[u8]) -> Result<Tokenizer, String> {
    let config = Config::next_to(path)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let (json, ends) = match kind {
        Kind::Ranks => tiktoken::as_json(bytes, config.special_tokens()?)?,
        Kind::WordPiece => {
            let tokens = word_piece::read(bytes)?;
            // What is around a text is in the file already.
            let none = || End { token: None, is_added: false };
            (word_piece::as_json(&tokens, config.cleaning(word_piece::is_lowercase(&tokens)))?, [none(), none()])
        }
        _ => sentencepiece::as_json(bytes, &name, &config)?,
    };
    let mut tokenizer = Tokenizer::from_bytes(json.to_string()).map_err(|error| error.to_string())?;
    check_ids(&tokenizer, &json)?;
    if let Some(template) = config.post_processor(&tokenizer, ends)? {
        tokenizer.with_post_processor(Some(template));
    }
    Ok(tokenizer)
}

/// `tokenizers` ignores the ids of added tokens: those that are not in the vocabulary are numbered behind it.
fn check_ids(tokenizer: &Tokenizer, json: &Value) -> Result<(), String> {
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let content = token["content"].as_str().unwrap_or_default();
        let found = tokenizer.token_to_id(content).map(u64::from);
        if found.is_none() || found != token["id"].as_u64() {
            let found = found.map_or("none".into(), |id| id.to_string());
            return Err(format!("the special token {content:?} has the id {}, and would have {found}", token["id"]));
        }
    }
    Ok(())
}

/// The text of a file as a `tokenizer.json`, unchanged if it is one.
pub fn tokenizer_json(path: &Path) -> Result<Vec<u8>, TokenizerFileError> {
    let failed = TokenizerFileError;
    let bytes = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    match Kind::of(&bytes) {
        Ok(Kind::Json) => Ok(bytes),
        _ => read_tokenizer(path)?.to_string(true).map(String::into_bytes).map_err(|error| failed(error.to_string())),
    }
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Json,
    SentencePiece,
    Ranks,
    WordPiece,
}

impl Kind {
    /// # Errors
    /// What the file is instead.
    fn of(bytes: &[u8]) -> Result<Self, String> {
        let text = bytes.trim_ascii_start();
        let starts = |with: &str| text.starts_with(with.as_bytes());
        match text.first() {
            None => Err("the file is empty".into()),
            Some(b'{') => Ok(Self::Json),
            _ if starts("version https://git-lfs") => Err("this is a pointer of Git LFS; fetch the file itself".into()),
            _ if starts("#version") => Err("these are the merges of a BPE, merges.txt, without its vocabulary".into()),
            _ if starts("PK") => Err("this is a ZIP archive, such as weights of PyTorch".into()),
            _ if starts("<") => Err("this is a page of a web site".into()),
            _ if tiktoken::is_ranks(bytes) => Ok(Self::Ranks),
            _ if word_piece::is_vocabulary(bytes) => Ok(Self::WordPiece),
            // The first field of a SentencePiece model is a piece, a message with a length.
            _ if bytes[0] == 0x0a => Ok(Self::SentencePiece),
            _ => Err("this is no tokenizer".into()),
        }
    }
}

#[cfg(test)]
mod tests;
