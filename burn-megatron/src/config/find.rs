//! A key by its name, in any spelling.

use super::key::Key;
use super::keys::KEYS;

/// The key of a path in any spelling.
pub fn find(path: &str) -> Option<&'static Key> {
    let (section, name) = path.split_once('.')?;
    let named = |key: &&Key| key.section() == section && (key.name() == name || key.aliases.contains(&name));
    KEYS.iter().find(named)
}

/// The key of this name in any section; a key's own name comes before aliases.
pub fn find_anywhere(name: &str) -> Option<&'static Key> {
    let own = KEYS.iter().find(|key| key.name() == name);
    own.or_else(|| KEYS.iter().find(|key| key.aliases.contains(&name)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::SECTIONS;

    #[test]
    fn names_are_unambiguous_and_sections_known() {
        let mut names: Vec<String> = Vec::new();
        for key in KEYS {
            assert!(SECTIONS.iter().any(|(section, _)| *section == key.section()), "{}", key.path);
            names.push(key.path.into());
            names.extend(key.aliases.iter().map(|alias| format!("{}.{alias}", key.section())));
        }
        let all = names.len();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), all);
        assert_eq!(find("parallel.tensor-model-parallel-size").map(|key| key.path), Some("parallel.tensor-parallel"));
        assert!(find("steps").is_none());
    }
}
