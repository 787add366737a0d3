//! Megatron-LM's layout string (megatron/core/transformer/pipeline_parallel_layer_layout.py).
//!
//! `E` embedding, `t` transformer layer, `m` multi-token-prediction layer, `L` loss; `|` ends a stage; `x*n` repeats a
//! character and `(…)*n` a group; commas mean nothing. `Et*3|(tt|)*29,m|L` has 32 stages.

use std::fmt;
use std::iter::Peekable;

use layouts::mesh::Nearest;

use super::{Stage, StageError, StageLayout};

/// The model and ranks that a layout string is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Transformer layers of the model.
    pub layers: usize,
    /// Its multi-token-prediction layers.
    pub mtp_layers: usize,
    /// Pipeline ranks.
    pub pipeline_parallel: usize,
    /// Stages per rank, if they are given next to the string.
    pub virtual_pipeline: Option<usize>,
}

/// Longest repetition; models have fewer layers.
const MOST: usize = 10_000;

impl StageLayout {
    /// Reads a layout string and checks it against the model and the ranks, with Megatron's rules.
    ///
    /// # Errors
    /// Names what is wrong in the string, where, and what would be right.
    pub fn parse(text: &str, expected: &Expected) -> Result<StageLayout, StageError> {
        let layout = Self::parse_unchecked(text)?;
        let ranks = expected.pipeline_parallel;
        let stages = layout.stages.len();
        if ranks == 0 || !stages.is_multiple_of(ranks) {
            let nearest = Nearest::where_legal(stages, stages + ranks, |n| ranks > 0 && n.is_multiple_of(ranks));
            return Err(StageError::Stages { text: text.into(), stages, ranks, nearest });
        }
        let chunks = stages / ranks;
        if let Some(asked) = expected.virtual_pipeline.filter(|&asked| asked != chunks) {
            return Err(StageError::Chunks { text: text.into(), chunks, asked });
        }
        let mtp = layout.stages.last().map_or(0, |stage| stage.mtp_layers.end);
        for (letter, found, wanted) in [('t', layout.num_layers(), expected.layers), ('m', mtp, expected.mtp_layers)] {
            if found != wanted {
                return Err(StageError::Count { text: text.into(), letter, found, wanted });
            }
        }
        let with_mtp = layout.stages.iter().position(|stage| !stage.mtp_layers.is_empty());
        if with_mtp.is_some_and(|stage| stage < stages - ranks) {
            return Err(StageError::Place { text: text.into(), rule: "`m` belongs into the last stage of a rank" });
        }
        Ok(layout)
    }

    /// Reads a layout string for any model and number of ranks.
    pub(super) fn parse_unchecked(text: &str) -> Result<StageLayout, StageError> {
        let rest = text.chars().enumerate().filter(|&(_, symbol)| symbol != ',').collect::<Vec<_>>();
        let symbols = Reader { text, rest: rest.into_iter().peekable() }.symbols()?;
        let place = |rule| StageError::Place { text: text.into(), rule };
        let mut layers = symbols.iter().filter(|&&symbol| symbol != '|').peekable();
        if layers.next() != Some(&'E') || layers.any(|&symbol| symbol == 'E') {
            return Err(place("exactly one `E` is needed, and it comes first"));
        }
        let mut layers = symbols.iter().rev().filter(|&&symbol| symbol != '|');
        if layers.next() != Some(&'L') || layers.any(|&symbol| symbol == 'L') {
            return Err(place("exactly one `L` is needed, and it comes last"));
        }
        let first_m = symbols.iter().position(|&symbol| symbol == 'm').unwrap_or(symbols.len());
        let mtp = &symbols[first_m..];
        if mtp.contains(&'t') {
            return Err(place("`m` comes after every `t`"));
        }
        let last_m = mtp.iter().rposition(|&symbol| symbol == 'm').unwrap_or(0);
        if mtp.get(..last_m).is_some_and(|between| between.contains(&'|')) {
            return Err(place("every `m` belongs into the same stage"));
        }
        let (mut layer, mut mtp_layer) = (0, 0);
        let stages = symbols.split(|&symbol| symbol == '|').map(|stage| {
            let count = |letter| stage.iter().filter(|&&symbol| symbol == letter).count();
            let (layers, mtp_layers) = (layer..layer + count('t'), mtp_layer..mtp_layer + count('m'));
            (layer, mtp_layer) = (layers.end, mtp_layers.end);
            Stage { embedding: count('E') > 0, layers, mtp_layers, loss: count('L') > 0 }
        });
        Ok(StageLayout { stages: stages.collect() })
    }
}

struct Reader<'a> {
    text: &'a str,
    /// What is not read yet, with its position, without commas.
    rest: Peekable<std::vec::IntoIter<(usize, char)>>,
}

impl Reader<'_> {
    /// The layers and stage ends, with repetitions written out. As in Megatron, groups are not nested.
    fn symbols(mut self) -> Result<Vec<char>, StageError> {
        let mut symbols = Vec::new();
        let mut open = None;
        while let Some((at, symbol)) = self.rest.next() {
            let start = symbols.len();
            match (symbol, open) {
                ('E' | 't' | 'm' | 'L' | '|', _) => symbols.push(symbol),
                ('(', None) => {
                    open = Some(start);
                    continue;
                }
                (')', Some(_)) => {}
                (other, _) => return Err(self.wrong(at, format!("`{other}` cannot stand here"))),
            }
            let begin = if symbol == ')' { open.take().unwrap_or(start) } else { start };
            if self.rest.next_if(|&(_, next)| next == '*').is_some() {
                let times = self.number(at)?;
                let part = symbols.split_off(begin);
                if part.len() * times > MOST {
                    return Err(self.wrong(at, format!("more than {MOST} characters")));
                }
                symbols.extend(part.repeat(times));
            } else if symbol == ')' {
                return Err(self.wrong(at, "`)` without `*` and a number".into()));
            }
        }
        match open {
            Some(_) => Err(self.wrong(self.text.chars().count().saturating_sub(1), "a `(` is open".into())),
            None => Ok(symbols),
        }
    }

    fn number(&mut self, at: usize) -> Result<usize, StageError> {
        let mut digits = String::new();
        while let Some((_, digit)) = self.rest.next_if(|(_, next)| next.is_ascii_digit()) {
            digits.push(digit);
        }
        let times = digits.parse().ok().filter(|&times| times <= MOST);
        times.ok_or_else(|| self.wrong(at + 1, format!("`*` without a number up to {MOST}")))
    }

    fn wrong(&self, at: usize, problem: String) -> StageError {
        StageError::Syntax { text: self.text.into(), at: at + 1, problem }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let repeated = |letter: char, times: usize| match times {
            0..=3 => String::from(letter).repeat(times),
            _ => format!("{letter}*{times}"),
        };
        let [embedding, loss] = [("E", self.embedding), ("L", self.loss)].map(|(text, is)| if is { text } else { "" });
        let (layers, mtp) = (repeated('t', self.layers.len()), repeated('m', self.mtp_layers.len()));
        write!(f, "{embedding}{layers}{mtp}{loss}")
    }
}

/// A short string that reads back as this layout.
impl fmt::Display for StageLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.stages.iter().map(Stage::to_string).collect();
        let Some((last, texts)) = texts.split_last() else { return Ok(()) };
        for equal in texts.chunk_by(|a, b| a == b) {
            match equal {
                [text] => write!(f, "{text}|")?,
                _ => write!(f, "({}|)*{}", equal[0], equal.len())?,
            }
        }
        f.write_str(last)
    }
}
