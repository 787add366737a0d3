//! The classes of an image classifier in a `config.json`.

use serde_json::{Map, Value, json};

use crate::hf::{ConfigReader, HfError};

/// Number of classes.
///
/// # Errors
/// If it is a model for regression or several labels at once.
pub(super) fn read(config: &ConfigReader) -> Result<usize, HfError> {
    config.expect_or_absent("problem_type", "single_label_classification")?;
    let classes = match config.map_len("id2label")? {
        Some(labels) => labels,
        None => config.size_or("num_labels", 2)?,
    };
    match classes {
        1 => Err(config.unsupported("num_labels", "1", "2: one label is for regression")),
        _ => Ok(classes),
    }
}

/// Gives the `config.json` of a classifier so many classes, with names of no meaning.
pub fn write(file: &mut Value, classes: usize) {
    let label = |class: usize| format!("LABEL_{class}");
    let id2label: Map<String, Value> = (0..classes).map(|class| (class.to_string(), json!(label(class)))).collect();
    let label2id: Map<String, Value> = (0..classes).map(|class| (label(class), json!(class))).collect();
    file["id2label"] = id2label.into();
    file["label2id"] = label2id.into();
}
