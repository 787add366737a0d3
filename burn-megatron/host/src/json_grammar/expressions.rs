//! Keywords of schemas that are regular expressions: `pattern` and `format` of strings, bounds of numbers.

use serde_json::{Map, Value};

use super::bounds::{Bound, between, scaled};
use super::ecma::translate;
use super::formats::{FORMATS, expression};
use super::pattern::Pattern;
use super::schema::Compiler;
use super::stack::NO_LIMIT;

/// Most ways from states to others in all patterns of a schema.
const MOST_WAYS: usize = 1 << 21;

impl Compiler<'_> {
    /// The automaton of what holds together.
    fn together(&mut self, all: impl IntoIterator<Item = Result<Pattern, String>>) -> Result<Pattern, String> {
        // Each costs time, whether it is a part of another or not.
        let mut counted = |pattern: Pattern| {
            self.ways += pattern.ways();
            match self.ways {
                ..=MOST_WAYS => Ok(pattern),
                _ => Err(format!("the patterns of the schema have more than {MOST_WAYS} ways from states to others")),
            }
        };
        let mut both: Option<Pattern> = None;
        for pattern in all {
            let pattern = counted(pattern?)?;
            both = Some(match both {
                Some(before) => counted(before.and(&pattern, MOST_WAYS)?)?,
                None => pattern,
            });
        }
        both.ok_or_else(|| "there is no expression".into())
    }

    /// What a string of so many characters must be, if `pattern` or `format` say it.
    pub(super) fn pattern(
        &mut self,
        keys: &Map<String, Value>,
        (min, max): (u32, u32),
    ) -> Result<Option<Pattern>, String> {
        let mut expressions = Vec::new();
        for key in ["pattern", "format"] {
            let Some(value) = keys.get(key) else { continue };
            let text = value.as_str().ok_or_else(|| "a string is needed".to_string());
            let expression = text.and_then(|text| match key {
                "pattern" => Ok(text.to_string()),
                _ => expression(text).ok_or_else(|| format!("is not supported; legal: {}", FORMATS.join(", "))),
            });
            let expression = expression.and_then(|text| translate(&text));
            expressions.push(expression.map_err(|what| self.wrong(format!("{key}: {value}: {what}")))?);
        }
        if expressions.is_empty() {
            return Ok(None);
        }
        if (min, max) != (0, NO_LIMIT) {
            let most = if max == NO_LIMIT { String::new() } else { max.to_string() };
            expressions.push(format!("\\A(?s:.){{{min},{most}}}\\z"));
        }
        let said = ["pattern", "format"].iter().find_map(|key| Some(format!("{key}: {}", keys.get(*key)?)));
        let made = self.together(expressions.iter().map(|expression| Pattern::new(expression)));
        made.map(Some).map_err(|what| self.wrong(format!("{}: {what}", said.unwrap_or_default())))
    }

    /// Between which numbers one must be, and of what a multiple, if the schema says it.
    pub(super) fn bounds(&mut self, keys: &Map<String, Value>, is_integer: bool) -> Result<Option<Pattern>, String> {
        let bound = |inclusive: &str, exclusive: &str| -> Result<Option<Bound>, String> {
            let (key, value, is_legal) = match (keys.get(inclusive), keys.get(exclusive)) {
                (Some(_), Some(_)) => {
                    let what = format!("`{exclusive}` next to `{inclusive}` is not supported; leave one of them out");
                    return Err(self.wrong(what));
                }
                (Some(value), None) => (inclusive, value, true),
                (None, Some(value)) => (exclusive, value, false),
                (None, None) => return Ok(None),
            };
            let Value::Number(number) = value else {
                return Err(self.wrong(format!("{key}: {value} is no number")));
            };
            Bound::new(number, is_legal).map(Some).map_err(|what| self.wrong(format!("{key}: {what}")))
        };
        let (least, most) = (bound("minimum", "exclusiveMinimum")?, bound("maximum", "exclusiveMaximum")?);
        let multiple = match keys.get("multipleOf") {
            None => None,
            Some(Value::Number(number)) => {
                let scaled = scaled(number).map_err(|what| self.wrong(format!("multipleOf: {what}")))?;
                Some(Ok(Pattern::multiples(scaled.0, scaled.1)))
            }
            Some(other) => return Err(self.wrong(format!("multipleOf: {other} is no number"))),
        };
        if least.is_none() && most.is_none() && multiple.is_none() {
            return Ok(None);
        }
        let numbers = between(least, most, is_integer).ok_or_else(|| self.wrong("no number is between its bounds"))?;
        let made = self.together([Pattern::new(&format!("\\A{numbers}\\z"))].into_iter().chain(multiple));
        made.map(Some).map_err(|what| self.wrong(what))
    }
}
