//! Schemas with a type.

use serde_json::{Map, Value};

use super::schema::{Compiler, KEYWORDS};
use super::stack::NO_LIMIT;
use super::{ANY, ANY_ARRAY, ANY_OBJECT, Key, Node};

/// The types of values.
const KINDS: [&str; 7] = ["object", "array", "string", "number", "integer", "boolean", "null"];

/// Most keys of an object that a schema names.
const MOST_KEYS: usize = 128;

impl Compiler<'_> {
    /// The types of a schema, if it says them.
    pub(super) fn kinds(&self, keys: &Map<String, Value>) -> Result<Option<Vec<String>>, String> {
        let kinds = match keys.get("type") {
            None => return Ok(None),
            Some(Value::Array(kinds)) if !kinds.is_empty() => kinds.as_slice(),
            Some(Value::Array(_)) => return Err(self.wrong("type: the list is empty, so that no value is legal")),
            Some(kind) => std::slice::from_ref(kind),
        };
        let kind = |kind: &Value| match kind.as_str().filter(|kind| KINDS.contains(kind)) {
            Some(kind) => Ok(kind.to_string()),
            None => Err(self.wrong(format!("type: {kind} is not known; legal: {}", KINDS.join(", ")))),
        };
        kinds.iter().map(kind).collect::<Result<Vec<_>, _>>().map(Some)
    }

    /// A schema of `type` and the keywords `used` of its kinds; without one, of the kind that its keywords are for.
    pub(super) fn of_kinds(&mut self, keys: &Map<String, Value>, used: &[&str]) -> Result<usize, String> {
        let kind_of = |key: &str| KEYWORDS.iter().find(|(_, known)| known.contains(&key)).map_or("", |(kind, _)| *kind);
        let kinds = match (self.kinds(keys)?, used.first()) {
            (Some(kinds), _) => kinds,
            (None, None) => return Ok(ANY),
            (None, Some(first)) => vec![kind_of(first).into()],
        };
        let is_of = |kind: &str, key: &str| kind == kind_of(key) || kind == "integer" && kind_of(key) == "number";
        if let Some(key) = used.iter().find(|key| **key != "type" && !kinds.iter().any(|kind| is_of(kind, key))) {
            let kinds = kinds.join(", ");
            return Err(self.wrong(format!("`{key}` says nothing of type {kinds}; leave it out or say the type")));
        }
        let mut nodes = Vec::new();
        for kind in kinds {
            nodes.push(self.typed(&kind, keys)?);
        }
        self.one_of(nodes)
    }

    fn typed(&mut self, kind: &str, keys: &Map<String, Value>) -> Result<usize, String> {
        let node = match kind {
            "object" => return self.object(keys),
            "array" => {
                let (min, max) = self.limits(kind, keys, ["minItems", "maxItems"])?;
                let items = keys.get("items").map_or(Ok(ANY), |items| self.inner("items", items))?;
                if (items, min, max) == (ANY, 0, NO_LIMIT) {
                    return Ok(ANY_ARRAY);
                }
                Node::Array { items, min, max }
            }
            "string" => {
                let (min, max) = self.limits(kind, keys, ["minLength", "maxLength"])?;
                match self.pattern(keys, (min, max))? {
                    Some(pattern) => Node::Pattern { pattern: pattern.into(), is_string: true },
                    None => Node::Text { min, max },
                }
            }
            "boolean" => Node::Texts(vec![b"false".to_vec(), b"true".to_vec()]),
            "null" => Node::Texts(vec![b"null".to_vec()]),
            _ => match self.bounds(keys, kind == "integer")? {
                Some(pattern) => Node::Pattern { pattern: pattern.into(), is_string: false },
                None => Node::Number { is_integer: kind == "integer" },
            },
        };
        self.add(node)
    }

    /// At least and at most so many.
    fn limits(&self, kind: &str, keys: &Map<String, Value>, names: [&str; 2]) -> Result<(u32, u32), String> {
        let count = |key: &str, absent: u32| match keys.get(key) {
            None => Ok(absent),
            Some(value) => match value.as_u64() {
                Some(count) => Ok(u32::try_from(count).unwrap_or(NO_LIMIT)),
                None => Err(self.wrong(format!("{key}: {value} is no whole number from 0"))),
            },
        };
        let (min, max) = (count(names[0], 0)?, count(names[1], NO_LIMIT)?);
        match min > max {
            true => Err(self.wrong(format!("{kind}: at least {min} and at most {max} cannot be"))),
            false => Ok((min, max)),
        }
    }

    fn object(&mut self, keys: &Map<String, Value>) -> Result<usize, String> {
        let none = Map::new();
        let properties = match keys.get("properties") {
            None => &none,
            Some(properties) => properties.as_object().ok_or_else(|| self.wrong("properties: an object is needed"))?,
        };
        let required: Vec<&str> = match keys.get("required") {
            None => Vec::new(),
            Some(all) => {
                let names = all.as_array().and_then(|all| all.iter().map(Value::as_str).collect());
                names.ok_or_else(|| self.wrong("required: a list of keys is needed"))?
            }
        };
        let others = match keys.get("additionalProperties") {
            Some(Value::Bool(false)) => None,
            None => Some(ANY),
            Some(schema) => Some(self.inner("additionalProperties", schema)?),
        };
        if properties.is_empty() && required.is_empty() && others == Some(ANY) {
            return Ok(ANY_OBJECT);
        }
        let unnamed: std::collections::BTreeSet<&str> =
            required.iter().copied().filter(|key| !properties.contains_key(*key)).collect();
        let many = properties.len() + unnamed.len();
        if many > MOST_KEYS {
            return Err(self.wrong(format!("an object of {many} keys; at most {MOST_KEYS} are supported")));
        }
        let mut all = Vec::new();
        for (key, schema) in properties {
            let value = self.inner(&format!("properties/{key}"), schema)?;
            all.push((Key { text: written(key), value }, required.contains(&key.as_str())));
        }
        for key in unnamed {
            let wrong = || self.wrong(format!("required: {key} is no property, and there are no others"));
            all.push((Key { text: written(key), value: others.ok_or_else(wrong)? }, true));
        }
        all.sort_by(|(a, _), (b, _)| a.text.cmp(&b.text));
        let needed = all.iter().enumerate().fold(0, |bits, (at, (_, is_needed))| bits | u128::from(*is_needed) << at);
        self.add(Node::Object { keys: all.into_iter().map(|(key, _)| key).collect(), needed, others })
    }
}

/// A key between its quotes.
fn written(key: &str) -> Vec<u8> {
    let quoted = Value::from(key).to_string();
    quoted.as_bytes()[1..quoted.len() - 1].to_vec()
}
