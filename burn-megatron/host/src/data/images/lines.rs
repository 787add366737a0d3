//! A list of images as lines of JSON.

use std::path::Path;

use serde_json::Value;

use super::super::bom::without_bom;
use super::decode::expect_kind;
use super::error::ImageError;
use super::sample::{Entry, Found, Location, NO_TARGET, head, target, unreadable};

/// The samples of a list. Empty lines are no samples.
pub(super) fn read(list: &Path) -> Result<Found, ImageError> {
    let text = std::fs::read(list).map_err(unreadable(list))?;
    let folder = list.parent().unwrap_or(Path::new(""));
    let mut found = Found::default();
    for (index, line) in without_bom(&text).split(|byte| *byte == b'\n').enumerate() {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let place = format!("{}:{}", list.display(), index + 1);
        match sample(line, folder, &place) {
            Ok(entry) => found.entries.push(entry),
            Err(what) => found.unusable.push(format!("{place}: {what}")),
        }
    }
    Ok(found)
}

fn sample(line: &[u8], folder: &Path, place: &str) -> Result<Entry, String> {
    let object: Value = serde_json::from_slice(line).map_err(|error| format!("is no JSON: {error}"))?;
    let name = match object.get("image") {
        Some(Value::String(name)) => name,
        Some(other) => return Err(format!("`image` is {other}; legal: the path of a file")),
        None => return Err("`image` is missing".into()),
    };
    let path = folder.join(name);
    let head = head(&path).map_err(|error| format!("image {name}: {error}"))?;
    expect_kind(&head).map_err(|what| format!("image {name} {what}"))?;
    let place = format!("{place}: image {name}");
    Ok(Entry { place, image: Location::File(path), target: target(&object)?.ok_or(NO_TARGET)? })
}
