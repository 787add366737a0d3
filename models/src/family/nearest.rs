//! The model here that is most like one of another `model_type`.

/// `model_type`s of relatives whose name does not say it.
const RELATIVES: [(&str, &str); 10] = [
    ("qwen", "qwen2"),
    ("qwen2_vl", "qwen2"),
    ("qwen2_5_vl", "qwen2"),
    ("phi", "phi3"),
    ("phimoe", "phi3"),
    ("chatglm", "glm4"),
    ("gpt_neox", "gpt2"),
    ("mamba", "mamba2"),
    ("falcon_mamba", "mamba2"),
    ("olmo", "olmo2"),
];

/// Of `legal` names the relative of `kind`, else the one with the fewest edits.
pub(super) fn nearest<'a>(kind: &str, legal: &[&'a str]) -> Option<&'a str> {
    let relative = RELATIVES.iter().find(|(known, _)| *known == kind).map(|(_, relative)| *relative);
    let known = relative.and_then(|relative| legal.iter().find(|name| **name == relative));
    known.or_else(|| legal.iter().min_by_key(|name| edits(kind, name))).copied()
}

/// Levenshtein's distance.
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, letter) in from.chars().enumerate() {
        let mut before = std::mem::replace(&mut row[0], line + 1);
        for (at, other) in to.iter().enumerate() {
            let replaced = before + usize::from(letter != *other);
            before = row[at + 1];
            row[at + 1] = replaced.min(before + 1).min(row[at] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relatives_come_before_spelling() {
        let legal = ["llama", "qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3_text", "phi3", "glm4", "deepseek_v3"];
        for (kind, expected) in [
            ("gemma", "gemma2"),
            ("chatglm", "glm4"),
            ("phimoe", "phi3"),
            ("qwen2_5_vl", "qwen2"),
            ("qwen4", "qwen2"),
            ("lama", "llama"),
            ("gemma3n_text", "gemma3_text"),
        ] {
            assert_eq!(nearest(kind, &legal), Some(expected), "{kind}");
        }
        assert_eq!(nearest("gemma", &["lama"]), Some("lama"));
    }

    #[test]
    fn edits_are_counted() {
        for (from, to, count) in [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "", 3), ("abc", "abc", 0)] {
            assert_eq!(edits(from, to), count);
        }
    }
}
