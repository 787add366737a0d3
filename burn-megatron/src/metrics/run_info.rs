//! What a run is called, and how it is configured.

use serde_json::Value;

/// What tracking services say of a run besides its numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RunInfo {
    /// Its name.
    pub name: String,
    /// Its resolved configuration.
    pub config: Value,
}

impl RunInfo {
    /// The configuration's keys, such as `training.seq-length`, and their values.
    pub(super) fn keys(&self) -> Vec<(String, &Value)> {
        fn flatten<'a>(path: &str, value: &'a Value, keys: &mut Vec<(String, &'a Value)>) {
            let Value::Object(fields) = value else {
                // No configuration is no key.
                return keys.extend((!path.is_empty()).then(|| (path.into(), value)));
            };
            for (name, value) in fields {
                flatten(&if path.is_empty() { name.clone() } else { format!("{path}.{name}") }, value, keys);
            }
        }
        let mut keys = Vec::new();
        flatten("", &self.config, &mut keys);
        keys
    }
}
