//! Conversations to tokens: rows of chat data, rendered with the tokenizer's own template.
//!
//! [`ChatTokenizer`] is a folder with `tokenizer.json` and a Jinja template; [`rows`] reads conversations in the usual
//! forms; [`ChatTokenizer::encode`] makes ids and assistant masks of one, as
//! `apply_chat_template(return_assistant_tokens_mask=True)` of Hugging Face's transformers does; [`pack`] puts several
//! into sequences of one length.
//!
//! ```
//! use host::data::chat::{ChatTokenizer, parse_row};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! # let folder = folder.path();
//! # let letters: Vec<String> = "abcdefghijklmnopqrstuvwxyz:\n.".chars().map(String::from).collect();
//! # let vocab: std::collections::BTreeMap<&String, usize> = letters.iter().zip(0..).collect();
//! # let model = serde_json::json!({"type": "BPE", "vocab": vocab, "merges": [], "unk_token": null});
//! # std::fs::write(folder.join("tokenizer.json"), serde_json::json!({"version": "1.0", "model": model}).to_string())?;
//! std::fs::write(
//!     folder.join("chat_template.jinja"),
//!     "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}.{% endgeneration %}{{ '\\n' }}{% endfor %}",
//! )?;
//! let tokenizer = ChatTokenizer::open(folder, None)?;
//! let row = parse_row(br#"{"messages": [{"role": "assistant", "content": "yes"}]}"#)?;
//! let sample = tokenizer.encode(&row)?;
//! assert_eq!(sample.text, "assistant:yes.\n");
//! assert_eq!(sample.mask.iter().filter(|counts| **counts).count(), "yes.".len());
//! # Ok(())
//! # }
//! ```

mod blend;
mod dataset;
mod encode;
mod error;
mod folder;
mod jinja;
mod learned;
mod lines;
mod pack;
mod packed;
mod pair_row;
mod pairs;
mod preprocess;
mod prompt;
mod python;
mod row;
mod sharegpt;
mod texts;
mod turns;
mod values;

pub use blend::ChatBlend;
pub use dataset::{ChatDataset, ChatReport, ChatSet};
pub use encode::{ChatSample, ChatTokenizer};
pub use error::{ChatError, Result};
pub use folder::special_token;
pub use learned::{ChatLoss, TooLong};
pub use lines::{Row, rows};
pub use pack::pack;
pub use packed::Packed;
pub use pairs::{PairDataset, PairSet, References};
pub use preprocess::{ChatPreprocess, ChatPreprocessReport, Skipped, preprocess_chat};
pub use prompt::{PromptBody, parse_prompt};
pub use row::{Conversation, parse_row};
