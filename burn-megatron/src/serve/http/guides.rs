//! Texts that `response_format` asks for.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::params::Params;
use crate::json_grammar::JsonGrammar;
use crate::logits::Guide;

/// Kinds of texts that are remembered.
const REMEMBERED: usize = 16;

/// The guides of the last requests, the last one first, each with what `response_format` said: programs ask again and again for
/// the same kind of text.
#[derive(Debug, Default)]
pub struct Guides(Mutex<VecDeque<(Value, Arc<Guide>)>>);

impl Guides {
    /// The guide that is remembered, or a new one.
    fn of<E>(&self, format: &Value, make: impl FnOnce() -> Result<Guide, E>) -> Result<Arc<Guide>, E> {
        let known = |known: &mut VecDeque<(Value, Arc<Guide>)>| {
            let at = known.iter().position(|(other, _)| other == format)?;
            known.remove(at).map(|(_, guide)| guide)
        };
        let found = known(&mut self.0.lock());
        // Other requests do not wait for a schema that is compiled.
        let guide = found.map_or_else(|| make().map(Arc::new), Ok)?;
        let mut all = self.0.lock();
        all.push_front((format.clone(), Arc::clone(&guide)));
        all.truncate(REMEMBERED);
        Ok(guide)
    }
}

/// The texts that `response_format` asks for, or the schema of `calls`.
pub(super) fn guide(params: &mut Params, app: &App, calls: Option<&Value>) -> Result<Option<Arc<Guide>>, ApiError> {
    let format = params.take("response_format").filter(|format| format["type"] != "text");
    let (key, format) = match (format, calls) {
        (None, None) => return Ok(None),
        (Some(format), None) => ("response_format", format),
        (None, Some(schema)) => ("tools", json!({"type": "json_schema", "json_schema": {"schema": schema}})),
        (Some(_), Some(_)) => {
            return Err(ApiError::param(
                "response_format",
                "tool_choice says that the answer is a call; leave one of them out",
            ));
        }
    };
    let wrong = |what: String| ApiError::param(key, what);
    if !format.is_object() {
        return Err(wrong(format!(
            "an object with a type is needed, such as {{\"type\": \"json_object\"}}, this is {format}"
        )));
    }
    let schema = &format["json_schema"]["schema"];
    let make = || {
        let grammar = match format["type"].as_str() {
            Some("json_object") => JsonGrammar::object(),
            Some("json_schema") if schema.is_null() => return Err(wrong("json_schema.schema is missing".into())),
            // A schema may be long: meanwhile other requests are answered.
            Some("json_schema") => tokio::task::block_in_place(|| JsonGrammar::of_schema(schema)).map_err(wrong)?,
            _ => return Err(wrong(format!("{} is no type; legal: text, json_object, json_schema", format["type"]))),
        };
        match app.stop_tokens.is_empty() {
            true => Err(wrong("no token of this model ends a text, so that none could end".into())),
            false => Ok(Guide::new(grammar, app.token_texts())),
        }
    };
    app.guides.of(&format, make).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json_grammar::TokenTexts;

    #[test]
    fn a_schema_is_compiled_once_while_it_is_remembered() {
        let guides = Guides::default();
        let of = |name: usize| {
            let mut made = false;
            let make = || {
                made = true;
                Ok::<_, ()>(Guide::new(JsonGrammar::object(), Arc::new(TokenTexts::new([]))))
            };
            guides.of(&json!({"type": "json_schema", "json_schema": {"name": name}}), make).unwrap();
            made
        };
        assert_eq!([0, 1, 0, 1].map(of), [true, true, false, false]);
        // The one that was not asked for longest is forgotten.
        assert!((2..=REMEMBERED).all(of) && !of(1) && of(0));
        assert_eq!(guides.of(&Value::Null, || Err("wrong")), Err("wrong"));
        assert_eq!(guides.0.lock().len(), REMEMBERED);
    }
}
