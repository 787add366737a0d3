//! The small files that come with a model's weights.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use models::hf::parse_config;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::error::HfFolderError;

/// The small text files of a folder, by name. They travel with a model, so that it can be written as it came.
///
/// The names are those of a fixed list, also where they were read from a checkpoint: others could lead anywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<String, String>")]
pub struct Companions(BTreeMap<String, String>);

impl TryFrom<BTreeMap<String, String>> for Companions {
    type Error = String;

    fn try_from(files: BTreeMap<String, String>) -> Result<Self, String> {
        match files.keys().find(|name| !COMPANIONS.contains(&name.as_str())) {
            Some(name) => {
                Err(format!("{name:?} is none of the files that come with a model; legal: {}", COMPANIONS.join(", ")))
            }
            None => Ok(Self(files)),
        }
    }
}

const COMPANIONS: [&str; 7] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
];

impl Companions {
    /// Those of a folder.
    ///
    /// # Errors
    /// If there is no such folder, or one of the files cannot be read.
    pub fn read(folder: &Path) -> Result<Self, HfFolderError> {
        std::fs::read_dir(folder).map_err(HfFolderError::io("list", folder))?;
        let present = COMPANIONS.iter().map(|name| (name, folder.join(name))).filter(|(_, path)| path.exists());
        let read = |(name, path): (&&str, PathBuf)| {
            let text = std::fs::read_to_string(&path).map_err(HfFolderError::io("read", &path))?;
            Ok((name.to_string(), text))
        };
        present.map(read).collect::<Result<_, _>>().map(Self)
    }

    /// Those of a model that came from no folder: what ends its texts, where something does, and a tokenizer of which
    /// `tokenizer.json` says everything else, if there is one. Without them transformers takes its own numbers for a
    /// family's, 2 for a Llama's.
    pub fn of_new_model(end: Option<i64>, tokenizer: Option<&Tokenizer>) -> Self {
        let generation = json!({ "bos_token_id": null, "eos_token_id": end });
        let token = |tokenizer: &Tokenizer| tokenizer.id_to_token(u32::try_from(end?).ok()?);
        let of_tokenizer = tokenizer
            .map(|tokenizer| json!({ "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token(tokenizer) }));
        let files = [("generation_config.json", Some(generation)), ("tokenizer_config.json", of_tokenizer)];
        let text = |(name, value): (&str, Option<Value>)| Some((name.to_string(), format!("{:#}\n", value?)));
        Self(files.into_iter().filter_map(text).collect())
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The `config.json` that the model was read from.
    pub(super) fn config(&self) -> Option<Value> {
        parse_config(self.0.get("config.json")?.as_bytes()).ok()
    }

    /// The other files of the list: name and text.
    pub(super) fn others(&self) -> impl Iterator<Item = (&str, &str)> {
        let others = COMPANIONS.iter().filter(|name| **name != "config.json");
        others.filter_map(|name| Some((*name, self.0.get(*name)?.as_str())))
    }
}
