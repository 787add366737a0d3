//! All problems of a configuration at once.

use std::fmt;

use strsim::damerau_levenshtein;

/// Where a value was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A line of the file, from 1.
    File {
        /// The file as it was named.
        name: String,
        /// Its line, from 1.
        line: usize,
    },
    /// The command line.
    CommandLine,
    /// The configuration as a whole: values contradict each other, or a needed one is missing.
    Whole,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line } => write!(f, "{name}:{line}: "),
            Self::CommandLine => f.write_str("command line: "),
            Self::Whole => Ok(()),
        }
    }
}

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{origin}{what}")]
pub struct Problem {
    /// Where it was written.
    pub origin: Origin,
    /// The key, its value and what would be legal.
    pub what: String,
}

impl Problem {
    /// A problem of the configuration as a whole.
    pub fn new(what: impl fmt::Display) -> Self {
        Self { origin: Origin::Whole, what: what.to_string() }
    }
}

/// All problems of a configuration, one per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigErrors(pub Vec<Problem>);

impl ConfigErrors {
    /// The problems as an error, if there are any.
    pub fn from_problems(problems: Vec<Problem>) -> Result<(), Self> {
        if problems.is_empty() { Ok(()) } else { Err(Self(problems)) }
    }
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_slice() {
            [one] => one.fmt(f),
            several => {
                write!(f, "{} problems", several.len())?;
                several.iter().try_for_each(|problem| write!(f, "\n  {problem}"))
            }
        }
    }
}

impl std::error::Error for ConfigErrors {}

/// `; did you mean X?` for the candidate that is closest to `word`, if one is close.
pub(super) fn did_you_mean<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> String {
    let section = |key: &'_ str| key.rsplit_once('.').map(|(section, _)| section.len());
    // A key that lacks a word is closer than the same name in another section.
    let far = |candidate: &'a str| {
        let (distance, edits) = distance(word, candidate);
        let here = section(word).is_some_and(|end| candidate.starts_with(&word[..=end]));
        ((2 * distance).saturating_sub(if here { 3 } else { 0 }), edits, distance)
    };
    let closest = candidates.into_iter().map(|candidate| (far(candidate), candidate)).min();
    match closest {
        Some(((.., distance), candidate)) if distance <= word.len() / 3 + 1 => format!("; did you mean `{candidate}`?"),
        _ => String::new(),
    }
}

/// Distance of a key from what was written, and the edits between the two to decide between equals.
fn distance(word: &str, candidate: &str) -> (usize, usize) {
    let edits = damerau_levenshtein(word, candidate);
    let (section, name) = word.rsplit_once('.').unwrap_or(("", word));
    let (other_section, other_name) = candidate.rsplit_once('.').unwrap_or(("", candidate));
    let within = |few: &str, many: &str| few.split('-').all(|word| many.split('-').any(|other| word == other));
    let distance = match (name == other_name, section == other_section) {
        // A name that lacks a word, and the right name in a wrong section.
        (false, true) if within(name, other_name) => 1,
        (true, _) => 2,
        _ => edits,
    };
    (distance.min(edits), edits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closest_key_is_suggested_also_from_another_section() {
        let keys = ["training.steps", "training.micro-batch", "data.split"];
        assert_eq!(did_you_mean("training.stpes", keys), "; did you mean `training.steps`?");
        assert_eq!(did_you_mean("data.micro-batch", keys), "; did you mean `training.micro-batch`?");
        assert_eq!(did_you_mean("training.flux-capacitor", keys), "");
    }

    #[test]
    fn several_problems_are_one_message() {
        let problem = |line| Problem { origin: Origin::File { name: "a.toml".into(), line }, what: "wrong".into() };
        assert_eq!(ConfigErrors(vec![problem(3)]).to_string(), "a.toml:3: wrong");
        let both = ConfigErrors(vec![problem(3), Problem::new("contradiction")]);
        assert_eq!(both.to_string(), "2 problems\n  a.toml:3: wrong\n  contradiction");
    }
}
