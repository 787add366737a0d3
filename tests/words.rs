//! The documents, the doc comments and the texts that users see are in the field's words. `words.toml` lists words that
//! are not, each with what to say instead.

use regex::{Regex, RegexBuilder};
use serde::Deserialize;
use tests::repository;

/// Files that tell the project's history, or list the words.
const HISTORY: [&str; 2] = ["CHANGELOG.md", "tests/words.rs"];

#[derive(Deserialize)]
struct List {
    word: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    pattern: String,
    say: String,
    #[serde(default)]
    allowed: Vec<String>,
}

/// A word of ours.
struct Word {
    pattern: Regex,
    say: String,
    /// Phrases in which the word is the field's own.
    allowed: Vec<Regex>,
}

impl Word {
    fn in_text(&self, text: &str) -> Option<String> {
        let rest =
            self.allowed.iter().fold(text.to_owned(), |text, phrase| phrase.replace_all(&text, "·").into_owned());
        self.pattern.find(&rest).map(|found| found.as_str().to_owned())
    }
}

fn words() -> Vec<Word> {
    let pattern = |text: &String| RegexBuilder::new(text).case_insensitive(true).build().expect("words.toml");
    let list: List = toml::from_str(&repository::read("tests/words.toml")).expect("words.toml");
    let word = |entry: Entry| Word {
        pattern: pattern(&entry.pattern),
        say: entry.say,
        allowed: entry.allowed.iter().map(pattern).collect(),
    };
    list.word.into_iter().map(word).collect()
}

/// The lines of a document.
fn of_document(text: &str) -> Vec<(usize, String)> {
    (1..).zip(text.lines().map(str::to_owned)).collect()
}

/// Doc comments and help texts of a source file; of the command line and the configuration all texts.
fn of_source(path: &str, text: &str) -> Vec<(usize, String)> {
    let literal = Regex::new(r#""((?:[^"\\]|\\.)*)""#).expect("a pattern");
    let shown = ["burn-megatron/src/cli/", "burn-megatron/src/config/"].iter().any(|folder| path.starts_with(folder));
    let mut texts = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let trimmed = line.trim_start();
        if trimmed.starts_with("///") || trimmed.starts_with("//!") {
            texts.push((number, trimmed.to_owned()));
        } else if (shown || line.contains("help")) && !trimmed.starts_with("//") {
            let code = line.split(" // ").next().unwrap_or(line);
            let of_line = literal.captures_iter(code).map(|found| found[1].to_owned());
            texts.extend(of_line.filter(|text| text.contains(' ')).map(|text| (number, text)));
            if code.trim_end().ends_with('\\') {
                texts.push((number, code.to_owned()));
            }
        }
    }
    texts
}

/// The comments of a TOML file.
fn of_configuration(text: &str) -> Vec<(usize, String)> {
    let comment = |line: &str| line.split_once('#').map(|(_, comment)| comment.to_owned());
    (1..).zip(text.lines()).filter_map(|(number, line)| Some((number, comment(line)?))).collect()
}

#[test]
fn texts_are_in_the_fields_words() {
    let words = words();
    let mut failures = Vec::new();
    let documents = repository::files(".md").into_iter().map(|path| (of_document(&repository::read(&path)), path));
    let sources = repository::files(".rs").into_iter().map(|path| (of_source(&path, &repository::read(&path)), path));
    let samples = repository::files(".toml").into_iter().filter(|path| path.starts_with("examples/configs/"));
    let samples = samples.map(|path| (of_configuration(&repository::read(&path)), path));
    for (texts, path) in documents.chain(sources).chain(samples) {
        if HISTORY.contains(&path.as_str()) {
            continue;
        }
        for (number, text) in texts {
            for word in &words {
                if let Some(found) = word.in_text(&text) {
                    failures.push(format!("{path}:{number}: \"{found}\"; say: {}", word.say));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} words that the field does not use:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn an_old_word_is_found_and_the_fields_own_phrases_are_not() {
    let words = words();
    let found = |text: &str| words.iter().find_map(|word| word.in_text(text));
    for old in [
        "an Exchange over the group",
        "rows of 8,192 tokens",
        "runs beside the backward pass",
        "the matrix product",
        "it goes on after step 3",
        "heads of 128",
        "copied by copy engines",
        "a mixture on four ranks",
    ] {
        assert!(found(old).is_some(), "not found in: {old}");
    }
    for fine in [
        "the dot product of two rows",
        "a power cut at any point",
        "a mixture of experts",
        "DMA copy engines",
        "the product of the sizes",
        "all-to-all next to the GEMM",
    ] {
        assert_eq!(found(fine), None, "found in: {fine}");
    }
}

#[test]
fn what_is_read_are_comments_and_texts_and_no_code() {
    let source = "/// one\nlet x = \"two words\"; // three\n//! four\nlet product = 5;\n";
    let texts = of_source("burn-megatron/src/cli/x.rs", source);
    assert_eq!(texts, [(1, "/// one".into()), (2, "two words".into()), (3, "//! four".into())]);
}
