//! Patterns of parameter paths.

/// Alternatives separated by `|`. One matches a path that contains it; `*` in it stands for any characters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    text: String,
}

impl Pattern {
    pub fn new(text: &str) -> Self {
        Self { text: text.into() }
    }

    /// The first alternative that matches `path`.
    pub fn matching(&self, path: &str) -> Option<&str> {
        self.alternatives().find(|alternative| contains(path, alternative))
    }

    /// The first alternative that matches none of `paths`.
    pub fn unmatched<'a>(&'a self, paths: &[String]) -> Option<&'a str> {
        self.alternatives().find(|alternative| !paths.iter().any(|path| contains(path, alternative)))
    }

    fn alternatives(&self) -> impl Iterator<Item = &str> {
        self.text.split('|').map(str::trim)
    }
}

fn contains(path: &str, pattern: &str) -> bool {
    let mut rest = path;
    !pattern.is_empty()
        && pattern.split('*').all(|part| match rest.find(part) {
            Some(at) => {
                rest = &rest[at + part.len()..];
                true
            }
            None => false,
        })
}

/// The path with a part most like `name`, by the number of characters to change.
pub(super) fn nearest<'a>(name: &str, paths: &'a [String]) -> Option<&'a String> {
    let distance = |path: &&String| {
        let parts = path.split('.').map(|part| edits(name, part));
        parts.chain([edits(name, path)]).min()
    };
    paths.iter().min_by_key(distance)
}

/// Levenshtein's distance.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_and_stars() {
        let pattern = Pattern::new("gate|layers.*.up");
        assert_eq!(pattern.matching("layers.0.mlp.gate.weight"), Some("gate"));
        assert_eq!(pattern.matching("layers.3.mlp.up.weight"), Some("layers.*.up"));
        assert_eq!((pattern.matching("head.up.weight"), Pattern::new("").matching("head")), (None, None));
        assert_eq!(Pattern::new("gate|uq").unmatched(&["a.gate".into(), "a.up".into()]), Some("uq"));
    }

    #[test]
    fn the_nearest_path_has_the_part_with_the_fewest_edits() {
        let paths = ["layers.0.gate.weight", "layers.0.down.weight"].map(String::from);
        assert_eq!(nearest("dwon", &paths), Some(&paths[1]));
        assert_eq!((edits("kitten", "sitting"), edits("", "ab")), (3, 2));
    }
}
