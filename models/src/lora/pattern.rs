//! Ranks and scales that some modules have of their own.

use std::collections::{BTreeMap, BTreeSet};

use super::LoraError;
use crate::names::fits;

/// Whether a name that is whole, or the last parts of one, and in which `*` stands for any characters, is the module's.
pub(super) fn names(pattern: &str, module: &str) -> bool {
    fits(pattern, module) || fits(&format!("*.{pattern}"), module)
}

/// The value of each of these modules that a pattern fits.
///
/// # Errors
/// If a pattern fits none of them, or two fit one.
pub(super) fn of_modules<'a, T: Copy>(
    key: &'static str,
    patterns: &BTreeMap<String, T>,
    modules: &BTreeSet<&'a str>,
) -> Result<BTreeMap<&'a str, T>, LoraError> {
    let mut found: BTreeMap<&str, (&str, T)> = BTreeMap::new();
    for (pattern, value) in patterns {
        let mut meant = modules.iter().filter(|module| names(pattern, module)).peekable();
        if meant.peek().is_none() {
            let known: BTreeSet<&str> = modules.iter().filter_map(|module| module.rsplit('.').next()).collect();
            let known = known.into_iter().collect::<Vec<_>>().join(", ");
            return Err(LoraError::Pattern { key, pattern: pattern.clone(), known });
        }
        for module in meant {
            if let Some((other, _)) = found.insert(module, (pattern, *value)) {
                let patterns = [other, pattern].map(String::from);
                return Err(LoraError::Twice { key, patterns, module: module.to_string() });
            }
        }
    }
    Ok(found.into_iter().map(|(module, (_, value))| (module, value)).collect())
}
