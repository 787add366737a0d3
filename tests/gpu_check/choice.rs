//! The command line: which check, its numbers, and which parts and cases of it.

use crate::report::Report;
use backend_dist::launch::BoxError;

/// A check or a benchmark.
pub struct Check {
    pub name: &'static str,
    pub about: &'static str,
    /// Names of its numbers, with what they are by default. It needs as many GPUs as `GPUS` says, one if it has no
    /// number at all, and else runs on CPU ranks.
    pub numbers: &'static [(&'static str, usize)],
    /// Words that each choose a part of it.
    pub parts: &'static [&'static str],
    /// Names of its cases.
    pub cases: fn() -> Vec<String>,
    pub run: fn(&Choice, &mut Report) -> Result<(), BoxError>,
}

/// What of a check is asked for.
#[derive(Default)]
pub struct Choice {
    pub numbers: Vec<usize>,
    parts: Vec<String>,
    /// Parts of the names of cases.
    words: Vec<String>,
}

impl Choice {
    /// Whether this part is asked for, by its name or as all are.
    pub fn does(&self, part: &str) -> bool {
        self.parts.is_empty() || self.names(part)
    }

    /// Whether this part or this word is asked for by its name.
    pub fn names(&self, name: &str) -> bool {
        self.parts.iter().chain(&self.words).any(|word| word == name)
    }

    /// Whether the case of this name is asked for.
    pub fn wants(&self, case: &str) -> bool {
        self.words.is_empty() || self.words.iter().any(|word| case.contains(word))
    }
}

impl Check {
    /// A check on one GPU without parts and cases.
    pub const fn new(
        name: &'static str,
        run: fn(&Choice, &mut Report) -> Result<(), BoxError>,
        about: &'static str,
    ) -> Self {
        Self { name, about, numbers: &[], parts: &[], cases: Vec::new, run }
    }

    /// # Errors
    /// A word that is neither a number nor chooses anything.
    pub fn choose(&self, arguments: &[String]) -> Result<Choice, String> {
        let cases = (self.cases)();
        let mut choice =
            Choice { numbers: self.numbers.iter().map(|(_, number)| *number).collect(), ..Choice::default() };
        let mut numbers = choice.numbers.iter_mut();
        for word in arguments {
            if self.parts.contains(&word.as_str()) {
                choice.parts.push(word.clone());
            } else if cases.iter().any(|case| case.contains(word)) {
                choice.words.push(word.clone());
            } else if let Some(number) = word.parse().ok().and_then(|number| Some((numbers.next()?, number))) {
                *number.0 = number.1;
            } else {
                return Err(unknown(word, self.parts.iter().copied().chain(cases.iter().map(String::as_str))));
            }
        }
        Ok(choice)
    }

    /// How many GPUs it needs.
    pub fn gpus(&self, choice: &Choice) -> usize {
        match self.numbers.first() {
            None => 1,
            Some(("GPUS", _)) => choice.numbers[0],
            Some(_) => 0,
        }
    }

    /// Prints what it is and its words.
    pub fn list(&self, with_cases: bool) {
        let number = |(name, default): &(&str, usize)| format!(" [{name}={default}]");
        let numbers: String = self.numbers.iter().map(number).collect();
        println!("{}{numbers}: {}", self.name, self.about);
        if !self.parts.is_empty() {
            println!("    {}", self.parts.join(" "));
        }
        let cases = if with_cases { (self.cases)() } else { Vec::new() };
        cases.iter().for_each(|case| println!("    \"{case}\""));
    }
}

/// The check of this name.
pub fn find<'a>(checks: &'a [Check], name: &str) -> Result<&'a Check, String> {
    let found = checks.iter().find(|check| check.name == name);
    found.ok_or_else(|| unknown(name, checks.iter().map(|check| check.name)))
}

fn unknown<'a>(word: &str, legal: impl Iterator<Item = &'a str>) -> String {
    let nearest = legal.max_by(|a, b| strsim::jaro(a, word).total_cmp(&strsim::jaro(b, word)));
    let nearest = nearest.map_or("no word is known here".into(), |nearest| format!("the nearest is `{nearest}`"));
    format!("`{word}` is unknown; {nearest}. `gpu_check --list` shows what there is")
}
