//! The sentences of a text, which become sequences of their own.

use unicode_segmentation::UnicodeSegmentation;

/// What a sentence is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Sentences {
    /// By Unicode's rules (UAX #29), but abbreviations in front of names and initials end none; a blank line ends one, another
    /// line break does not.
    Unicode,
    /// A line.
    Lines,
}

/// English words in front of names and numbers, whose full stop Unicode's rules take for the end of a sentence.
const ABBREVIATIONS: [&str; 32] = [
    "Mr.", "Mrs.", "Ms.", "Messrs.", "Dr.", "Prof.", "Rev.", "Hon.", "Gov.", "Pres.", "Sen.", "Rep.", "Gen.", "Col.",
    "Maj.", "Capt.", "Lt.", "Sgt.", "Adm.", "St.", "Mt.", "Ft.", "No.", "Nos.", "Vol.", "Fig.", "Eq.", "Ch.", "Sec.",
    "vs.", "cf.", "approx.",
];

impl Sentences {
    /// The sentences of a text in order, none of them blank: without the white space around them, or with that behind them.
    ///
    /// ```
    /// use host::data::preprocess::Sentences;
    ///
    /// let text = "Mr. Bach was born in\nEisenach. J. S. Bach wrote fugues!\n\nThey are long";
    /// let three = ["Mr. Bach was born in\nEisenach.", "J. S. Bach wrote fugues!", "They are long"];
    /// assert_eq!(Sentences::Unicode.of(text, false), three);
    /// assert_eq!(Sentences::Unicode.of(text, true).concat(), text);
    /// ```
    pub fn of(self, text: &str, keep_newlines: bool) -> Vec<&str> {
        let parts: Vec<&str> = match self {
            Self::Lines => text.split_inclusive('\n').collect(),
            Self::Unicode => paragraphs(text).into_iter().flat_map(of_paragraph).collect(),
        };
        let shown = |part: &&str| !part.trim().is_empty();
        parts.into_iter().filter(shown).map(|part| if keep_newlines { part } else { part.trim() }).collect()
    }
}

/// The parts of a text that end with blank lines.
fn paragraphs(text: &str) -> Vec<&str> {
    let (mut all, mut start, mut end, mut has_ended) = (Vec::new(), 0, 0, false);
    for line in text.split_inclusive('\n') {
        let is_blank = line.trim().is_empty();
        if has_ended && !is_blank {
            all.push(&text[start..end]);
            start = end;
        }
        has_ended = is_blank;
        end += line.len();
    }
    all.push(&text[start..]);
    all
}

fn of_paragraph(paragraph: &str) -> Vec<&str> {
    // To Unicode's rules every line break ends a sentence, and texts are wrapped.
    let line = paragraph.replace(['\n', '\r'], " ");
    let (mut all, mut start, mut end) = (Vec::new(), 0, 0);
    for part in line.split_sentence_bounds() {
        end += part.len();
        if end == line.len() || !goes_on(&line[start..end]) {
            all.push(&paragraph[start..end]);
            start = end;
        }
    }
    all
}

/// Whether what Unicode's rules take for a sentence ends with an abbreviation.
fn goes_on(text: &str) -> bool {
    let word = text.trim_end().rsplit(char::is_whitespace).next().unwrap_or_default();
    let word = word.trim_start_matches(|character: char| !character.is_alphanumeric());
    let is_initial = |letter: &str| {
        let mut characters = letter.chars();
        characters.next().is_some_and(char::is_uppercase) && characters.next().is_none()
    };
    // `J.` and `U.S.`, but not the pronoun.
    let are_initials = || word != "I." && word.strip_suffix('.').is_some_and(|word| word.split('.').all(is_initial));
    ABBREVIATIONS.contains(&word) || are_initials()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_end_where_readers_end_them() {
        for (text, expected) in [
            ("One. Two? Three!", &["One.", "Two?", "Three!"][..]),
            ("It cost 3.50 dollars. Cheap.", &["It cost 3.50 dollars.", "Cheap."]),
            (
                "Dr. Who, i.e. the Doctor, left. He (Mr. X) came.",
                &["Dr. Who, i.e. the Doctor, left.", "He (Mr. X) came."],
            ),
            ("The U.S. Army. So did I. Good.", &["The U.S. Army.", "So did I.", "Good."]),
            ("He said: “Go.” Then he went.", &["He said: “Go.”", "Then he went."]),
            ("Wrapped\r\nline. Next\nline.", &["Wrapped\r\nline.", "Next\nline."]),
            ("A title\n \nA text", &["A title", "A text"]),
            ("第一句。第二句！", &["第一句。", "第二句！"]),
            ("Mr.", &["Mr."]),
            ("\n\n", &[]),
            ("", &[]),
        ] {
            assert_eq!(Sentences::Unicode.of(text, false), expected, "{text:?}");
        }
    }

    #[test]
    fn a_line_is_a_sentence_if_it_is_to_be_one() {
        let text = "Mr. X. Came.\n\n went \r\nhome";
        assert_eq!(Sentences::Lines.of(text, false), ["Mr. X. Came.", "went", "home"]);
        assert_eq!(Sentences::Lines.of(text, true), ["Mr. X. Came.\n", " went \r\n", "home"]);
    }
}
