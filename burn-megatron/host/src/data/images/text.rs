//! What is said of an image, as tokens of a language model that sees.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tokenizers::Tokenizer;

use super::error::ImageError;
use super::sample::Target;
use crate::data::chat::{ChatTokenizer, parse_row, special_token};
use crate::data::read_tokenizer;

/// Stands for the image in texts and chat templates, as in transformers.
const IMAGE: &str = "<image>";

/// A text with its image: the image is one token here, and as many as it has features in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageText {
    ids: Vec<u32>,
    /// By token, whether it is learned.
    learned: Vec<bool>,
}

/// Makes tokens of captions and conversations.
pub struct ImageTokenizer {
    tokenizer: Tokenizer,
    /// For conversations; or why there is none.
    chat: Result<ChatTokenizer, String>,
    /// Token id that stands for one feature of an image, and its name.
    image: (u32, String),
    /// Features of an image.
    features: usize,
    /// Where every sequence begins.
    begin: Option<u32>,
    /// Where a text ends.
    end: Option<u32>,
    /// Tokens of a sequence with its image.
    length: usize,
}

impl ImageTokenizer {
    /// Of a `tokenizer.json` with its chat template, or that of the file `template`, for sequences of `length` tokens, of which
    /// an image has `features`, each the token `image`.
    ///
    /// # Errors
    /// If the tokenizer cannot be read, or has no token `image`.
    pub fn open(
        path: &Path,
        template: Option<&Path>,
        (image, features): (usize, usize),
        length: usize,
    ) -> Result<Self, ImageError> {
        let refused = |what: String| ImageError::Tokenizer { path: path.into(), what };
        let tokenizer = read_tokenizer(path).map_err(|error| refused(error.to_string()))?;
        let image = u32::try_from(image).unwrap_or(u32::MAX);
        let lacking = || refused(format!("it has no token {image}, which stands for images (image_token_index)"));
        let name = tokenizer.id_to_token(image).ok_or_else(lacking)?;
        let chat = ChatTokenizer::open(path, template).map_err(|error| error.to_string());
        let chat = if template.is_some() { Ok(chat.map_err(refused)?) } else { chat };
        let folder: PathBuf = if path.is_dir() { path.into() } else { path.parent().unwrap_or(path).into() };
        let special = |name: &str| -> Result<Option<u32>, ImageError> {
            let token = special_token(&folder, name).map_err(|error| refused(error.to_string()))?;
            Ok(token.and_then(|token| tokenizer.token_to_id(&token)))
        };
        let (begin, end) = (special("bos_token")?, special("eos_token")?);
        let around = tokenizer.encode("a", true).map_err(|error| refused(error.to_string()))?;
        // Tokenizers without a beginning of their own name one too.
        let begin = begin.filter(|begin| around.get_ids().first() == Some(begin));
        Ok(Self { tokenizer, chat, image: (image, name), features, begin, end, length })
    }

    /// The tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// A caption follows its image and is learned, with the end of the text. Of a conversation what the assistant says is. A
    /// conversation whose messages do not say where the image is begins with it; one whose template writes no end of the text
    /// has one.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn encode(&self, target: &Target) -> Result<ImageText, String> {
        let (mut ids, mut learned) = match target {
            Target::Label(_) => return Err("has a `label`; legal: `text` or `messages`".into()),
            Target::Text(text) => self.caption(text)?,
            Target::Messages(messages) => self.conversation(messages)?,
        };
        if let Some(begin) = self.begin.filter(|begin| ids.first() != Some(begin)) {
            ids.insert(0, begin);
            learned.insert(0, false);
        }
        if let Some(end) = self.end.filter(|end| !ids[1..].contains(end)) {
            ids.push(end);
            learned.push(true);
        }
        let (image, images) = (&self.image.1, self.images(&ids));
        if images != 1 {
            return Err(format!("has {images} {image}; legal: 1, for a sample has one image"));
        }
        if !learned[1..].contains(&true) {
            return Err("has nothing to learn; give it a text, or an answer of the assistant".into());
        }
        let tokens = ids.len() - 1 + self.features;
        if tokens > self.length {
            return Err(format!(
                "has {tokens} tokens with its image; legal: up to {} (training.seq-length)",
                self.length
            ));
        }
        Ok(ImageText { ids, learned })
    }

    fn images(&self, ids: &[u32]) -> usize {
        ids.iter().filter(|id| **id == self.image.0).count()
    }

    fn caption(&self, text: &str) -> Result<(Vec<u32>, Vec<bool>), String> {
        let all = format!("{}{}", self.image.1, text.trim());
        let encoded = self.tokenizer.encode(all, false).map_err(|error| format!("`text` has no tokens: {error}"))?;
        let ids = encoded.get_ids().to_vec();
        let learned = ids.iter().map(|id| *id != self.image.0).collect();
        Ok((ids, learned))
    }

    fn conversation(&self, messages: &Value) -> Result<(Vec<u32>, Vec<bool>), String> {
        let chat = self.chat.as_ref().map_err(|what| format!("`messages` need a chat template: {what}"))?;
        let encoded = |messages: &Value| {
            let row = parse_row(json!({ "messages": messages }).to_string().as_bytes())?;
            let sample = chat.encode(&row)?;
            Ok::<_, String>((sample.ids, sample.mask))
        };
        let of_texts = messages.as_array().is_some_and(|all| all.iter().all(|message| message["content"].is_string()));
        if !of_texts {
            return encoded(messages);
        }
        // Templates of models with images take lists of parts, others texts.
        match encoded(&in_parts(messages)) {
            Ok(found) if self.images(&found.0) == 1 => Ok(found),
            of_parts => encoded(&with_image(messages)).or(of_parts),
        }
    }

    /// Tokens and labels of a sequence of one length, of padding behind the text; -100 is no label.
    pub fn sequence(&self, text: &ImageText) -> [Vec<i64>; 2] {
        let padding = i64::from(self.image.0 == 0);
        let (mut tokens, mut labels) = (Vec::with_capacity(self.length), Vec::with_capacity(self.length));
        for (id, learned) in text.ids.iter().zip(&text.learned) {
            let (id, count) = (i64::from(*id), if *id == self.image.0 { self.features } else { 1 });
            tokens.extend(std::iter::repeat_n(id, count));
            labels.extend(std::iter::repeat_n(if *learned { id } else { -100 }, count));
        }
        tokens.resize(self.length, padding);
        labels.resize(self.length, -100);
        [tokens, labels]
    }
}

/// Where the image goes if no message says so: the first one of a user.
fn without_place(messages: &Value) -> Option<usize> {
    let all = messages.as_array()?;
    let has = |message: &Value| message["content"].as_str().is_some_and(|text| text.contains(IMAGE));
    if all.iter().any(has) { None } else { all.iter().position(|message| message["role"] == "user") }
}

fn with_image(messages: &Value) -> Value {
    let mut messages = messages.clone();
    if let Some(index) = without_place(&messages) {
        let text = messages[index]["content"].as_str().unwrap_or_default();
        messages[index]["content"] = format!("{IMAGE}\n{text}").into();
    }
    messages
}

/// The messages with lists of parts in place of texts, of images first, as transformers' templates write them.
fn in_parts(messages: &Value) -> Value {
    let mut messages = with_image(messages);
    for message in messages.as_array_mut().into_iter().flatten() {
        let text = message["content"].as_str().unwrap_or_default();
        let images = text.matches(IMAGE).map(|_| json!({"type": "image"}));
        let rest = text.replace(IMAGE, "");
        let rest = json!({"type": "text", "text": rest.trim()});
        message["content"] = images.chain([rest]).collect();
    }
    messages
}
