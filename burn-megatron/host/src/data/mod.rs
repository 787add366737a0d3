//! Text to tokens to samples, on the host only: nothing here knows tensors or ranks.
//!
//! - [`indexed`]: Megatron's `.bin`/`.idx` files, read at their positions and written byte for byte.
//! - [`preprocess`]: `.txt` and `.jsonl` files to `.bin`/`.idx`, with an existing tokenizer or one made on the spot.
//! - [`chat`]: conversations to sequences with the tokenizer's chat template, and which of their tokens are learned.
//! - [`images`]: images with classes, texts or conversations, and what makes them a model's input.
//! - [`GptSplits`]: training, validation and test samples of one dataset or a [`Blend`], in Megatron's exact order.
//! - [`masked`]: sentences whose tokens are masked, for encoders, in Megatron's exact order.
//! - [`TokensInMemory`], [`RandomWindows`]: the same [`TokenDataset`] over tokens in memory.
//!
//! A dataset is a fixed order of samples of S tokens; reading one takes the same time wherever it is.
//!
//! ```
//! use host::data::indexed::{Dtype, IndexedWriter};
//! use host::data::{Blend, GptDataConfig, GptSplits, TokenDataset};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let prefix = folder.path().join("numbers");
//! let mut writer = IndexedWriter::create(&prefix, Dtype::for_vocabulary(1000))?;
//! for document in 0..10i64 {
//!     writer.push_sequence(&Vec::from_iter(document * 100..document * 100 + 50))?;
//!     writer.end_document();
//! }
//! writer.finish()?;
//!
//! let config = GptDataConfig { split: "80,20".parse()?, ..GptDataConfig::new(16) };
//! let splits = GptSplits::build(&Blend::single(&prefix), &config)?;
//! let train = splits.train.expect("a share of 80");
//! assert_eq!(train.len(), (8 * 50 - 1) / 16);
//! let sample = train.sample(3);
//! assert_eq!(sample.tokens.len(), 16);
//! assert_eq!(sample.tokens[1..], sample.labels[..15]);
//! # Ok(())
//! # }
//! ```

mod blend;
mod bom;
mod build;
pub mod chat;
mod ending;
mod error;
mod gpt;
pub mod images;
pub mod indexed;
pub mod masked;
mod memory;
pub mod npy;
pub mod numpy;
mod order;
mod parquet;
pub mod preprocess;
mod prompts;
mod sample;
mod split;
mod taught;
mod token_bytes;
mod tokenizer_file;
mod top_k;
mod zstd;

pub use blend::{Blend, BlendIndex, BlendedDataset};
pub use bom::read_text;
pub use build::{GptDataConfig, GptSplit, GptSplits};
pub use ending::{JSON_LINES, ending};
pub use error::DataError;
pub use gpt::{EpochPlan, GptDataset, GptOptions};
pub use memory::{RandomWindows, TokensInMemory};
pub use order::check_samples;
pub use prompts::{Prompt, PromptDataset, PromptSet};
pub use sample::{Sample, SampleError, TokenDataset};
pub use split::{Split, SplitRatios};
pub use taught::{TaughtDataset, TopKFile, TopKWriter, sequence_key};
pub use token_bytes::token_bytes;
pub use tokenizer_file::tokenizer_path;
pub use tokenizer_file::{TokenizerFileError, find_tokenizer, read_tokenizer, readable_tokenizer, tokenizer_json};
pub use top_k::TopK;
