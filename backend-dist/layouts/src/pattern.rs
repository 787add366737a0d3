//! Names of tensors by pattern.

/// Whether the name of a global tensor fits a pattern, in which `*` stands for any characters, also none.
///
/// ```
/// use layouts::pattern::fits;
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
