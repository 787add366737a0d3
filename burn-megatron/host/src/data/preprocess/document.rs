//! One document: the value of each key, as text, as sentences or as token ids.

use serde_json::{Map, Value};

use super::source::Body;

/// The value of a key.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Field {
    Text(String),
    /// An array of texts.
    Sentences(Vec<String>),
    Ids(Vec<i64>),
}

/// The values of `keys`; what is wrong with the document if it has not all of them.
pub(super) fn fields(body: Body, keys: &[String]) -> Result<Vec<Field>, String> {
    let value = match body {
        Body::Text(bytes) => Value::String(String::from_utf8(bytes).map_err(|error| {
            // The first bytes of gzip and zstd.
            let packed = [&[0x1f, 0x8b][..], &[0x28, 0xb5, 0x2f, 0xfd]];
            let packed = packed.into_iter().any(|magic| error.as_bytes().starts_with(magic));
            let advice = if packed { "; it is compressed, unpack it first" } else { "" };
            format!("not UTF-8 at byte {} of the document{advice}", error.utf8_error().valid_up_to())
        })?),
        Body::Json(bytes) => serde_json::from_slice(bytes.trim_ascii_end()).map_err(|error| {
            // The document is one line, so only the column of the parser's position says anything.
            let text = error.to_string();
            let what = text.split(" at line ").next().unwrap_or(&text).to_owned();
            format!("not JSON: {what} at column {}", error.column())
        })?,
        Body::Value(value) => value,
        Body::Bad(what) => return Err(what),
    };
    match value {
        Value::Object(mut object) => keys.iter().map(|key| field(key, take(&mut object, key)?)).collect(),
        value => match keys {
            [key] => Ok(vec![field(key, value)?]),
            keys => Err(format!("one value, but {} keys are wanted ({})", keys.len(), keys.join(", "))),
        },
    }
}

fn take(object: &mut Map<String, Value>, key: &str) -> Result<Value, String> {
    object.remove(key).ok_or_else(|| {
        let keys: Vec<&str> = object.keys().map(String::as_str).collect();
        let nearest = keys.iter().map(|other| (strsim::jaro(other, key), other)).max_by(|a, b| a.0.total_cmp(&b.0));
        let nearest = nearest.filter(|(alike, _)| *alike > 0.7).map(|(_, other)| format!("did you mean `{other}`? "));
        format!("no key '{key}'; {}the keys are {}", nearest.unwrap_or_default(), keys.join(", "))
    })
}

fn field(key: &str, value: Value) -> Result<Field, String> {
    match value {
        Value::String(text) => Ok(Field::Text(text)),
        Value::Array(values) if !values.is_empty() && values.iter().all(Value::is_string) => {
            let text = |value| if let Value::String(text) = value { Some(text) } else { None };
            Ok(Field::Sentences(values.into_iter().filter_map(text).collect()))
        }
        Value::Array(values) => {
            let id = |(i, value): (usize, &Value)| {
                value.as_i64().ok_or_else(|| format!("key '{key}': element {i} of the array, {value}, is no token id"))
            };
            values.iter().enumerate().map(id).collect::<Result<_, _>>().map(Field::Ids)
        }
        other => Err(format!("key '{key}' is neither text nor an array of texts or token ids: {other}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str, keys: &[&str]) -> Result<Vec<Field>, String> {
        let keys: Vec<String> = keys.iter().map(|key| key.to_string()).collect();
        fields(Body::Json(json.as_bytes().to_vec()), &keys)
    }

    #[test]
    fn keys_are_text_sentences_or_ids() {
        let fields = parse(r#"{"a": "x", "b": [1, 2], "c": null}"#, &["b", "a"]).unwrap();
        assert_eq!(fields, [Field::Ids(vec![1, 2]), Field::Text("x".into())]);
        assert_eq!(parse(r#"{"a": ["x", ""]}"#, &["a"]).unwrap(), [Field::Sentences(vec!["x".into(), String::new()])]);
        assert_eq!(parse("[3]", &["text"]).unwrap(), [Field::Ids(vec![3])]);
        assert_eq!(parse("[]", &["text"]).unwrap(), [Field::Ids(vec![])]);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let wrong = |json, keys: &[&str]| parse(json, keys).unwrap_err();
        assert_eq!(wrong(r#"{"a": 1, "b": 2}"#, &["text"]), "no key 'text'; the keys are a, b");
        let texts = wrong(r#"{"texts": "x", "id": 2}"#, &["text"]);
        assert_eq!(texts, "no key 'text'; did you mean `texts`? the keys are id, texts");
        assert_eq!(wrong("{\"text\": \r\n", &["text"]), "not JSON: EOF while parsing a value at column 8");
        assert_eq!(
            wrong(r#"{"text": [1, "x"]}"#, &["text"]),
            "key 'text': element 1 of the array, \"x\", is no token id"
        );
        assert_eq!(
            wrong(r#"{"text": 7}"#, &["text"]),
            "key 'text' is neither text nor an array of texts or token ids: 7"
        );
        assert_eq!(wrong("[1]", &["a", "b"]), "one value, but 2 keys are wanted (a, b)");
        let error = fields(Body::Text(vec![b'a', 0xff]), &["text".into()]).unwrap_err();
        assert_eq!(error, "not UTF-8 at byte 1 of the document");
        let error = fields(Body::Text(vec![0x1f, 0x8b, 8]), &["text".into()]).unwrap_err();
        assert_eq!(error, "not UTF-8 at byte 1 of the document; it is compressed, unpack it first");
    }
}
