//! Values as Python writes them: `json.dumps` for the filter `tojson`, and `str` for what a template prints.
//!
//! transformers replaces Jinja's own `tojson`, which escapes HTML, by `json.dumps(x, ensure_ascii=False)`
//! (`transformers/utils/chat_template_utils.py`).

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// The arguments of `json.dumps` that templates use.
#[derive(Clone, Debug, Default)]
pub(super) struct Dumps {
    pub ensure_ascii: bool,
    /// What each level is indented by.
    pub indent: Option<String>,
    /// Between items, and between key and value.
    pub separators: Option<(String, String)>,
    pub sort_keys: bool,
}

impl Dumps {
    /// The text of `value`. Fails if it has something that JSON does not, such as an undefined value.
    pub fn dump(&self, value: &Value) -> Result<String, Error> {
        let mut text = String::new();
        self.write(&mut text, value, 0)?;
        Ok(text)
    }

    fn separators(&self) -> (&str, &str) {
        match (&self.separators, &self.indent) {
            (Some((item, key)), _) => (item, key),
            (None, Some(_)) => (",", ": "),
            (None, None) => (", ", ": "),
        }
    }

    fn new_line(&self, out: &mut String, level: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..level).for_each(|_| out.push_str(indent));
        }
    }

    fn write(&self, out: &mut String, value: &Value, level: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&number(value)),
            ValueKind::String => self.string(out, value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                let values: Vec<(Value, Value)> = keys
                    .into_iter()
                    .map(|key| Ok((key.clone(), value.get_item(&key)?)))
                    .collect::<Result<_, Error>>()?;
                self.list(out, ('{', '}'), values, level, |out, (key, value)| {
                    self.string(out, &self.key(key)?);
                    out.push_str(self.separators().1);
                    self.write(out, value, level + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let values: Vec<Value> = value.try_iter()?.collect();
                self.list(out, ('[', ']'), values, level, |out, value| self.write(out, value, level + 1))?;
            }
            kind => {
                let what = format!("{kind} has no JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, what));
            }
        }
        Ok(())
    }

    fn list<T>(
        &self,
        out: &mut String,
        (open, close): (char, char),
        items: Vec<T>,
        level: usize,
        mut item: impl FnMut(&mut String, &T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (index, value) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(self.separators().0);
            }
            self.new_line(out, level + 1);
            item(out, value)?;
        }
        if !items.is_empty() {
            self.new_line(out, level);
        }
        out.push(close);
        Ok(())
    }

    fn key(&self, key: &Value) -> Result<String, Error> {
        match key.as_str() {
            Some(text) => Ok(text.into()),
            None => self.dump(key),
        }
    }

    fn string(&self, out: &mut String, text: &str) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' || self.ensure_ascii && !(' '..='~').contains(&c) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn number(value: &Value) -> String {
    if value.is_integer() {
        value.to_string()
    } else {
        f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
    }
}

/// Python's `repr` of a float: the shortest digits, in scientific form below 1e-4 and from 1e16.
pub(super) fn float(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() { "NaN".into() } else { format!("{}Infinity", if value < 0.0 { "-" } else { "" }) };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("scientific notation has an exponent");
    match exponent.parse::<i32>().unwrap_or_default() {
        exponent if value != 0.0 && !(-4..16).contains(&exponent) => {
            format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
        }
        _ => format!("{value:?}"),
    }
}

/// What `{{ value }}` prints.
pub(super) fn print(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value.as_str().unwrap_or_default().into(),
        _ => repr(value),
    }
}

fn repr(value: &Value) -> String {
    let items = |value: &Value| -> Vec<Value> { value.try_iter().map(Iterator::collect).unwrap_or_default() };
    match value.kind() {
        ValueKind::None => "None".into(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.into(),
        ValueKind::Number => number(value),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            let items: Vec<String> = items(value).iter().map(repr).collect();
            format!("[{}]", items.join(", "))
        }
        ValueKind::Map => {
            let entry = |key: &Value| format!("{}: {}", repr(key), repr(&value.get_item(key).unwrap_or_default()));
            let items: Vec<String> = items(value).iter().map(entry).collect();
            format!("{{{}}}", items.join(", "))
        }
        _ => value.to_string(),
    }
}

/// Python's `repr` of a string.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c < ' ' || c == '\u{7f}' => {
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(json: &str) -> Value {
        serde_json::from_str(json).unwrap()
    }

    /// Expected values: `json.dumps(json.loads(text), ensure_ascii=False)` of Python 3.12.
    #[test]
    fn json_is_written_as_python_writes_it() {
        let text =
            r#"{"z":[1,2.50,1e16,1e-5,1e22,-0.0,123456789.125],"a":{"b":null,"c":[],"d":{}},"s":"<&\"\\\n\u0001é☃"}"#;
        let expected = r#"{"z": [1, 2.5, 1e+16, 1e-05, 1e+22, -0.0, 123456789.125], "a": {"b": null, "c": [], "d": {}}, "s": "<&\"\\\n\u0001é☃"}"#;
        assert_eq!(Dumps::default().dump(&value(text)).unwrap(), expected);
        let ascii = Dumps { ensure_ascii: true, sort_keys: true, ..Dumps::default() };
        assert_eq!(ascii.dump(&value(r#"{"b":"é😀","a":true}"#)).unwrap(), r#"{"a": true, "b": "\u00e9\ud83d\ude00"}"#);
        let indented = Dumps { indent: Some("  ".into()), ..Dumps::default() };
        assert_eq!(
            indented.dump(&value(r#"{"a":[1,2],"b":[]}"#)).unwrap(),
            "{\n  \"a\": [\n    1,\n    2\n  ],\n  \"b\": []\n}"
        );
        assert!(Dumps::default().dump(&Value::UNDEFINED).is_err());
    }

    #[test]
    fn values_are_printed_as_python_prints_them() {
        assert_eq!(print(&value(r#"{"a":[true,null,1.0],"b":"it's"}"#)), r#"{'a': [True, None, 1.0], 'b': "it's"}"#);
        assert_eq!((print(&value("\"a'b\"")), print(&Value::UNDEFINED)), ("a'b".into(), String::new()));
    }
}
