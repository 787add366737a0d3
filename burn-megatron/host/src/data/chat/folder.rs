//! What a tokenizer's folder says: `tokenizer.json`, the names of special tokens, and the chat templates.

use std::path::{Path, PathBuf};

use minijinja::value::Value;
use serde_json::Value as Json;
use tokenizers::Tokenizer;

use super::super::ending::ending;
use super::error::{ChatError, Result};
use super::jinja::Template;
use crate::data::{read_text, read_tokenizer, tokenizer_path};

/// How a template is given.
pub(super) const OTHER_TEMPLATE: &str =
    "chat.template, preference.template or grpo.template of a run, --chat-template of other commands";

/// Files with the names of special tokens, the later ones first.
const CONFIGS: [&str; 2] = ["tokenizer_config.json", "special_tokens_map.json"];

/// A folder's contents.
pub(super) struct Folder {
    pub tokenizer: Tokenizer,
    /// Such as `bos_token`; null where the folder says that there is none.
    pub special: Vec<(String, Option<String>)>,
    /// For conversations without tools, and with them.
    pub templates: [Source; 2],
}

/// A template and where it is from.
#[derive(Clone)]
pub(super) struct Source {
    pub path: PathBuf,
    pub text: String,
}

impl Source {
    pub fn compile(&self) -> Result<Template> {
        Template::new(&self.text)
            .map_err(|error| ChatError::Template { path: self.path.clone(), what: error.to_string() })
    }
}

impl Folder {
    /// Reads a folder, or the folder of a tokenizer's file. `template` takes the place of its own templates.
    pub fn open(path: &Path, template: Option<&Path>) -> Result<Self> {
        let (folder, file) = match path.is_dir() {
            true => (path.to_path_buf(), tokenizer_path(path)),
            false => (path.parent().unwrap_or(Path::new(".")).to_path_buf(), path.to_path_buf()),
        };
        let refused = |what: String| ChatError::Tokenizer { path: file.clone(), what };
        if !file.is_file() {
            return Err(refused("there is no such file; name a folder with a tokenizer.json".into()));
        }
        let tokenizer = read_tokenizer(&file).map_err(|error| refused(error.to_string()))?;
        let configs = configs(&folder)?;
        let special = special_tokens(&configs);
        let templates = match template {
            Some(path) => {
                let source = read_template(path)?;
                [source.clone(), source]
            }
            None => templates(&folder, configs.first())?,
        };
        Ok(Self { tokenizer, special, templates })
    }

    /// Special tokens that `template` writes, as its variables. Fails if the folder does not say what they are, or the
    /// tokenizer does not have them.
    pub fn variables(&self, template: &Template, source: &Source) -> Result<Vec<(String, Value)>> {
        let refused = |what: String| ChatError::Template { path: source.path.clone(), what };
        for name in template.variables().into_iter().filter(|name| name.ends_with("_token")) {
            let token = self.special.iter().find(|(key, _)| *key == name);
            let Some((_, token)) = token else {
                return Err(refused(format!(
                    "it writes {name}, which tokenizer_config.json does not have; add \"{name}\" there, null if there is none"
                )));
            };
            if let Some(token) = token.as_ref().filter(|token| self.tokenizer.token_to_id(token).is_none()) {
                return Err(refused(format!(
                    "it writes {name} = {token}, which is no token of tokenizer.json; add it to added_tokens there, or give a \
                     template that fits the tokenizer: {OTHER_TEMPLATE}"
                )));
            }
        }
        let known = self.special.iter().filter_map(|(key, token)| Some((key.clone(), Value::from(token.clone()?))));
        Ok(known.collect())
    }
}

/// The files of a folder that name special tokens.
fn configs(folder: &Path) -> Result<Vec<(PathBuf, Json)>> {
    let paths = CONFIGS.iter().map(|name| folder.join(name)).filter(|path| path.is_file());
    paths.map(|path| read_json(&path).map(|json| (path, json))).collect()
}

fn special_tokens(configs: &[(PathBuf, Json)]) -> Vec<(String, Option<String>)> {
    let mut special: Vec<(String, Option<String>)> = Vec::new();
    for (key, value) in configs.iter().filter_map(|(_, json)| json.as_object()).flatten() {
        let token = value.as_str().or_else(|| value["content"].as_str());
        let known = special.iter().any(|(other, _)| other == key);
        if key.ends_with("_token") && !known && (token.is_some() || value.is_null()) {
            special.push((key.clone(), token.map(String::from)));
        }
    }
    special
}

/// The special token that a folder's `tokenizer_config.json` or `special_tokens_map.json` has under a name such as
/// `bos_token`.
///
/// # Errors
/// If one of these files cannot be read.
pub fn special_token(folder: &Path, name: &str) -> Result<Option<String>> {
    let special = special_tokens(&configs(folder)?);
    Ok(special.into_iter().find(|(key, _)| key == name).and_then(|(_, token)| token))
}

fn read(path: &Path) -> Result<String> {
    read_text(path).map_err(|cause| ChatError::Read { path: path.into(), cause })
}

fn read_json(path: &Path) -> Result<Json> {
    let json = serde_json::from_str(&read(path)?);
    json.map_err(|error| ChatError::Tokenizer { path: path.into(), what: error.to_string() })
}

/// A template in a file of its own, or under `chat_template` of a JSON file.
fn read_template(path: &Path) -> Result<Source> {
    let text = match ending(path) == "json" {
        false => read(path)?,
        true => match &read_json(path)?["chat_template"] {
            Json::String(text) => text.clone(),
            _ => {
                return Err(ChatError::Template {
                    path: path.into(),
                    what: "there is no text under chat_template".into(),
                });
            }
        },
    };
    Ok(Source { path: path.into(), text })
}

/// The folder's own: a file, or text in `tokenizer_config.json`, where several may have names.
fn templates(folder: &Path, config: Option<&(PathBuf, Json)>) -> Result<[Source; 2]> {
    let mut named: Vec<(String, Source)> = Vec::new();
    if let Some((path, json)) = config {
        let source = |text: &str| Source { path: path.clone(), text: text.into() };
        match &json["chat_template"] {
            Json::String(text) => named.push(("default".into(), source(text))),
            Json::Array(list) => {
                let entry = |entry: &Json| Some((entry["name"].as_str()?.into(), source(entry["template"].as_str()?)));
                named.extend(list.iter().filter_map(entry));
            }
            _ => {}
        }
    }
    // Files come first, as in transformers.
    for (name, file) in [
        ("default", "chat_template.json"),
        ("default", "chat_template.jinja"),
        ("tool_use", "additional_chat_templates/tool_use.jinja"),
    ] {
        if folder.join(file).is_file() {
            named.retain(|(other, _)| other != name);
            named.push((name.into(), read_template(&folder.join(file))?));
        }
    }
    let find = |name: &str| named.iter().find(|(other, _)| other == name).map(|(_, source)| source.clone());
    match (find("default"), find("tool_use")) {
        (Some(default), tools) => Ok([default.clone(), tools.unwrap_or(default)]),
        (None, _) => Err(ChatError::Tokenizer {
            path: folder.into(),
            what: format!(
                "there is no chat template, neither chat_template.jinja nor chat_template in tokenizer_config.json; give \
                 one: {OTHER_TEMPLATE}"
            ),
        }),
    }
}
