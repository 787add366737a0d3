//! Names of tensors by pattern, and parameters that are frozen by their names.

use backend_dist::shard::{Init, Section};

use super::{BuildError, ParamBuilder};

impl ParamBuilder<'_> {
    /// Parameters whose names [fit](fits) one of these patterns are frozen: they have no gradient and are unknown to the
    /// optimizer, and checkpoints have them with the other weights.
    pub fn with_frozen(mut self, patterns: &[String]) -> Self {
        self.frozen = patterns.to_vec();
        self
    }

    /// Whether a parameter of these sections is frozen by its name.
    pub(super) fn freezes(&self, sections: &[(Section, Init)]) -> Result<bool, BuildError> {
        let is_frozen = |name: &str| self.frozen.iter().any(|pattern| fits(pattern, name));
        let (frozen, other): (Vec<&str>, Vec<&str>) =
            sections.iter().map(|(section, _)| section.name.as_str()).partition(|name| is_frozen(name));
        match (frozen.first(), other.first()) {
            (Some(frozen), Some(other)) => {
                Err(BuildError::HalfFrozen { frozen: frozen.to_string(), other: other.to_string() })
            }
            (first, _) => Ok(first.is_some()),
        }
    }
}

/// Whether the name of a global tensor fits a pattern, in which `*` stands for any characters, also none.
///
/// ```
/// use models::param::fits;
///
/// let name = "layers.11.attention.q_proj.weight";
/// assert!(fits("*.attention.*", name) && fits("layers.11.*", name) && fits(name, name));
/// assert!(!fits("layers.1.*", name) && !fits("attention", name));
/// ```
pub fn fits(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == name };
    let Some(mut name) = name.strip_prefix(start) else { return false };
    let (between, end) = rest.rsplit_once('*').unwrap_or(("", rest));
    for part in between.split('*') {
        let Some(at) = name.find(part) else { return false };
        name = &name[at + part.len()..];
    }
    name.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_are_any_characters_and_nothing_overlaps() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("a*", "a", true),
            ("a*a", "a", false),
            ("*b*b", "xb", false),
            ("*b*b", "xbyb", true),
            ("a*b*c", "a.b.bc", true),
            ("a**c", "abc", true),
            ("a*c*", "abd", false),
            ("", "a", false),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }
}
