//! What a model has written, and whether it is right.

/// How an answer is compared with the right ones. Spaces around both do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExactMatch {
    /// Letters are compared in lower case.
    pub ignore_case: bool,
    /// ASCII punctuation is left out.
    pub ignore_punctuation: bool,
}

impl ExactMatch {
    /// Whether an answer is one of the targets.
    pub fn matches(&self, answer: &str, targets: &[String]) -> bool {
        let answer = self.normal(answer);
        targets.iter().any(|target| self.normal(target) == answer)
    }

    fn normal(&self, text: &str) -> String {
        let kept: String = text.chars().filter(|c| !self.ignore_punctuation || !c.is_ascii_punctuation()).collect();
        let kept = if self.ignore_case { kept.to_lowercase() } else { kept };
        kept.trim().to_string()
    }
}

/// The text before the first of the texts that end it.
pub(super) fn before<'a>(text: &'a str, until: &[String]) -> &'a str {
    let ends = until.iter().filter(|end| !end.is_empty());
    ends.filter_map(|end| text.find(end.as_str())).min().map_or(text, |end| &text[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_where_it_should() {
        let until = ["\n\n".to_string(), "Q:".into(), String::new()];
        assert_eq!(before(" 42 Q: next\n\n", &until), " 42 ");
        assert_eq!(before("none of them", &until), "none of them");
    }

    #[test]
    fn spaces_case_and_punctuation_may_differ() {
        let targets = ["Paris".to_string(), "the capital".into()];
        let plain = ExactMatch::default();
        assert!(plain.matches(" Paris\n", &targets) && !plain.matches("paris", &targets));
        let loose = ExactMatch { ignore_case: true, ignore_punctuation: true };
        assert!(loose.matches("paris.", &targets) && loose.matches("The capital!", &targets));
        assert!(!loose.matches("Rome", &targets));
    }
}
