//! `tokenizer_config.json` of transformers, which says what is not in a tokenizer's file, and what is put around a text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tokenizers::Tokenizer;
use tokenizers::processors::template::TemplateProcessing;

use super::added_token::added_token;
use super::word_piece::Cleaning;

/// The file next to a tokenizer's.
pub(super) struct Config {
    path: PathBuf,
    /// Null if there is no such file.
    value: Value,
}

/// A special token of one end of a text.
pub(super) struct End {
    pub token: Option<String>,
    /// Whether the model's own tokenizer puts it there if the configuration does not say.
    pub is_added: bool,
}

impl Config {
    /// # Errors
    /// If the file is no JSON.
    pub fn next_to(file: &Path) -> Result<Self, String> {
        let path = file.with_file_name("tokenizer_config.json");
        let value = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?,
            Err(_) => Value::Null,
        };
        Ok(Self { path, value })
    }

    /// The special tokens and their ids; none if there is no list of them. Fails if the list is none.
    pub fn special_tokens(&self) -> Result<Option<Vec<(usize, String)>>, String> {
        let broken = || format!("{} next to it has no list of special tokens", self.path.display());
        let Some(tokens) = self.value.get("added_tokens_decoder") else { return Ok(None) };
        let of = |(id, token): (&String, &Value)| Some((id.parse().ok()?, token["content"].as_str()?.to_string()));
        tokens.as_object().ok_or_else(broken)?.iter().map(of).collect::<Option<Vec<_>>>().map(Some).ok_or_else(broken)
    }

    /// The tokens that transformers adds by their ids, as `tokenizer.json` has them: those of `added_tokens_decoder`, or of an
    /// `added_tokens.json` of old. Fails if the list is none.
    pub fn added_tokens(&self) -> Result<BTreeMap<usize, Value>, String> {
        let Some(listed) = self.special_tokens()? else { return self.added_tokens_of_old() };
        let decoder = &self.value["added_tokens_decoder"];
        let of = |(id, content): (usize, String)| {
            let listed = &decoder[id.to_string()];
            let mut token = added_token(id, &content, listed["special"] == true);
            for key in ["single_word", "lstrip", "rstrip"] {
                if let Some(flag) = listed[key].as_bool() {
                    token[key] = flag.into();
                }
            }
            (id, token)
        };
        Ok(listed.into_iter().map(of).collect())
    }

    /// Ids by token; those that `tokenizer_config.json` names are special.
    fn added_tokens_of_old(&self) -> Result<BTreeMap<usize, Value>, String> {
        let path = self.path.with_file_name("added_tokens.json");
        let Ok(text) = std::fs::read(&path) else { return Ok(BTreeMap::new()) };
        let ids: BTreeMap<String, usize> =
            serde_json::from_slice(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let names: Vec<&Value> = self.value.as_object().into_iter().flat_map(Map::values).collect();
        let is_special = |content: &str| {
            let is = |value: &Value| *value == content || value["content"] == content;
            names.iter().any(|value| is(value) || value.as_array().is_some_and(|all| all.iter().any(is)))
        };
        let of = |(content, id): (String, usize)| (id, added_token(id, &content, is_special(&content)));
        Ok(ids.into_iter().map(of).collect())
    }

    /// Whether a text alone begins with a space that it does not have, and not what follows a special token too (`legacy`).
    pub fn prefixes_texts_alone(&self) -> bool {
        self.value["legacy"] == false
    }

    /// How many `<extra_id_N>` T5's tokenizer appends.
    pub fn extra_ids(&self) -> u64 {
        let is_t5 = self.value["tokenizer_class"].as_str().is_some_and(|class| class.starts_with("T5Tokenizer"));
        self.value["extra_ids"].as_u64().unwrap_or(if is_t5 { 100 } else { 0 })
    }

    /// How BERT's tokenizer cleans a text.
    pub fn cleaning(&self, lowercase: bool) -> Cleaning {
        let flag = |name: &str| self.value[name].as_bool();
        Cleaning {
            lowercase: flag("do_lower_case").unwrap_or(lowercase),
            strip_accents: flag("strip_accents"),
            chinese: flag("tokenize_chinese_chars").unwrap_or(true),
        }
    }

    /// What puts the special tokens in front of and behind a text; none if there are none. Fails if a token that is
    /// added is not named, or unknown.
    pub fn post_processor(
        &self,
        tokenizer: &Tokenizer,
        [bos, eos]: [End; 2],
    ) -> Result<Option<TemplateProcessing>, String> {
        let (bos, eos) = (self.added("bos", bos)?, self.added("eos", eos)?);
        let mut special = serde_json::Map::new();
        for token in bos.iter().chain(&eos) {
            let id = tokenizer.token_to_id(token).ok_or_else(|| format!("its special token {token} is not in it"))?;
            special.insert(token.clone(), json!({"id": token, "ids": [id], "tokens": [token]}));
        }
        if special.is_empty() {
            return Ok(None);
        }
        let around = |sequence: &str, type_id: u8| {
            let end = |token: &String| json!({"SpecialToken": {"id": token, "type_id": type_id}});
            let sequence = json!({"Sequence": {"id": sequence, "type_id": type_id}});
            bos.iter().map(end).chain([sequence]).chain(eos.iter().map(end)).collect::<Vec<_>>()
        };
        let pair = [around("A", 0), around("B", 1)].concat();
        let template = json!({
            "type": "TemplateProcessing", "single": around("A", 0), "pair": pair, "special_tokens": special,
        });
        serde_json::from_value(template).map(Some).map_err(|error| error.to_string())
    }

    /// The special token that is added at an end, `bos` or `eos`.
    fn added(&self, side: &str, own: End) -> Result<Option<String>, String> {
        let flag = self.value[format!("add_{side}_token")].as_bool();
        if !flag.unwrap_or(own.is_added) {
            return Ok(None);
        }
        let token = match self.value.get(format!("{side}_token")) {
            Some(token) => token.as_str().or(token["content"].as_str()).map(String::from),
            None => own.token,
        };
        match token {
            None if flag == Some(true) => Err(format!("{} adds a {side}_token and has none", self.path.display())),
            token => Ok(token),
        }
    }
}
