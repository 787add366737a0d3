//! Tokenizers in the files in which models are published: `tokenizer.json`, SentencePiece's `.model`, and tiktoken's ranks.
//! All become a tokenizer of the `tokenizers` crate, told by what is in the file and not by its name: Llama 2 and Llama 3
//! both come with a `tokenizer.model`, and one is SentencePiece's, the other tiktoken's.

mod byte_symbol;
mod sentencepiece;
mod tiktoken;
mod wire;

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

pub(in crate::data) use byte_symbol::byte_symbol;

/// Names of a tokenizer in a folder, the first that is there counts.
const NAMES: [&str; 7] = [
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "tokenizer.tiktoken",
];

/// What is wrong with a tokenizer's file; who reads it names it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TokenizerFileError(String);

/// The file of a folder that has its tokenizer.
pub fn find_tokenizer(folder: &Path) -> Option<PathBuf> {
    NAMES.iter().map(|name| folder.join(name)).find(|path| path.is_file())
}

/// Reads a `tokenizer.json`, a SentencePiece model (unigram or BPE), or tiktoken's ranks.
///
/// Control symbols of a SentencePiece model become special tokens, which are found in a text, as in `tokenizer.json`
/// files; SentencePiece itself never finds them. Special tokens of tiktoken's ranks are those of Llama 3 or of Qwen, told by
/// the number of ranks, or those that `tokenizer_config.json` next to the file lists.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("letters.tiktoken");
/// std::fs::write(&path, "YQ== 0\nYg== 1\nYWI= 2\n")?;
/// let tokenizer = burn_megatron::data::read_tokenizer(&path)?;
/// assert_eq!(tokenizer.encode("abba", false).unwrap().get_ids(), [2, 1, 0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Says what the file is if that can be told, and what is read.
pub fn read_tokenizer(path: &Path) -> Result<Tokenizer, TokenizerFileError> {
    let failed = TokenizerFileError;
    let bytes = std::fs::read(path).map_err(|error| failed(error.to_string()))?;
    let json = match Kind::of(&bytes) {
        Ok(Kind::Json) => None,
        Ok(Kind::SentencePiece) => Some(sentencepiece::as_json(&bytes).map_err(failed)?),
        Ok(Kind::Ranks) => {
            let config = path.with_file_name("tokenizer_config.json");
            let special = tiktoken::listed(&config).map_err(failed)?;
            Some(tiktoken::as_json(&bytes, special).map_err(failed)?)
        }
        Err(what) => {
            return Err(failed(format!(
                "{what}; a tokenizer.json, a SentencePiece model (unigram or BPE) and tiktoken ranks are read"
            )));
        }
    };
    let tokenizer = match &json {
        Some(json) => Tokenizer::from_bytes(json.to_string()),
        None => Tokenizer::from_bytes(&bytes),
    };
    tokenizer.map_err(|error| failed(error.to_string()))
}

/// The text of a file as a `tokenizer.json`, unchanged if it is one.
///
/// # Errors
/// As [`read_tokenizer`].
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
            // The first field of a SentencePiece model is a piece, a message with a length.
            _ if bytes[0] == 0x0a => Ok(Self::SentencePiece),
            _ => Err("this is no tokenizer".into()),
        }
    }
}

#[cfg(test)]
mod tests;
