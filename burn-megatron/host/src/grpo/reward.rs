//! What a completion is worth.

use std::fmt;

use regex::Regex;
use serde_json::Value;

/// Any error.
type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A completion to be judged.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// The row of the prompt, with all its keys.
    pub row: &'a Value,
    /// The prompt as the model reads it.
    pub prompt: &'a str,
    /// What the model wrote, without special tokens.
    pub text: &'a str,
}

/// A program that rewards completions. It runs on the rank that has drawn them, on several ranks at once; functions are
/// rewards too.
///
/// ```
/// use host::grpo::{Completion, Reward};
///
/// let brief = |completion: &Completion| 1.0 / (1.0 + completion.text.len() as f64);
/// let row = serde_json::json!({ "prompt": "Say hi." });
/// assert_eq!(brief.reward(&Completion { row: &row, prompt: "Say hi.", text: "hi!" })?, 0.25);
/// # Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
/// ```
pub trait Reward: Send + Sync {
    /// The reward of a completion, a finite number.
    ///
    /// # Errors
    /// If there is none; the run ends with it.
    fn reward(&self, completion: &Completion) -> Result<f64, BoxError>;

    /// Whether a row can be judged, before anything starts.
    ///
    /// # Errors
    /// The key and what is wrong with it.
    fn check(&self, _row: &Value) -> Result<(), String> {
        Ok(())
    }
}

impl fmt::Debug for dyn Reward {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("a reward")
    }
}

impl<F: Fn(&Completion) -> f64 + Send + Sync> Reward for F {
    fn reward(&self, completion: &Completion) -> Result<f64, BoxError> {
        Ok(self(completion))
    }
}

/// 1 for a completion whose answer is the `answer` of its row, else 0. Spaces around both do not count, nor do commas
/// between the digits of numbers, of which 7 and 7.0 are the same.
#[derive(Clone, Debug, Default)]
pub struct ExactAnswer {
    pattern: Option<Regex>,
}

impl ExactAnswer {
    /// The answer is what `pattern`, a regular expression, finds last in a completion: its first group, or all of it
    /// where it has none. Without a pattern it is the whole completion.
    ///
    /// # Errors
    /// If the expression is none.
    pub fn new(pattern: Option<&str>) -> Result<Self, String> {
        let compile = |pattern: &str| Regex::new(pattern).map_err(|error| error.to_string());
        Ok(Self { pattern: pattern.map(compile).transpose()? })
    }

    fn answer<'a>(&self, text: &'a str) -> Option<&'a str> {
        let Some(pattern) = &self.pattern else { return Some(text) };
        let last = pattern.captures_iter(text).last()?;
        last.get(1).or(last.get(0)).map(|found| found.as_str())
    }
}

impl Reward for ExactAnswer {
    fn reward(&self, completion: &Completion) -> Result<f64, BoxError> {
        let right = expected(completion.row).ok_or("answer: missing")?;
        let found = self.answer(completion.text);
        Ok(f64::from(u8::from(found.is_some_and(|found| same(found, &right)))))
    }

    fn check(&self, row: &Value) -> Result<(), String> {
        expected(row).map(drop).ok_or_else(|| "answer: missing; a text or a number, what completions must say".into())
    }
}

fn expected(row: &Value) -> Option<String> {
    match &row["answer"] {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    }
}

fn same(a: &str, b: &str) -> bool {
    let number = |text: &str| text.replace(',', "").parse::<f64>().ok();
    let (a, b) = (a.trim(), b.trim());
    a == b || number(a).is_some_and(|a| Some(a) == number(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_answer_counts_however_it_is_written() {
        let reward = |pattern: Option<&str>, answer: Value, text: &str| {
            let row = serde_json::json!({ "answer": answer });
            ExactAnswer::new(pattern).unwrap().reward(&Completion { row: &row, prompt: "", text }).unwrap()
        };
        let boxed = Some(r"\\boxed\{([^}]*)\}");
        assert_eq!(reward(None, 7.into(), " 7\n"), 1.0);
        assert_eq!(reward(None, 7.into(), "7 apples"), 0.0);
        assert_eq!(reward(boxed, "7".into(), r"\boxed{3} no, \boxed{7.0}"), 1.0);
        assert_eq!(reward(boxed, "7".into(), r"\boxed{7} no, \boxed{3}"), 0.0);
        assert_eq!(reward(boxed, "7".into(), "7"), 0.0);
        assert_eq!(reward(Some(r"#### *\S+"), "#### 12".into(), "so #### 12"), 1.0);
        assert_eq!(reward(Some("####(.*)"), "1,234".into(), "#### 1234"), 1.0);
        assert_eq!(reward(None, "Paris".into(), "paris"), 0.0);
        assert!(ExactAnswer::new(Some("(")).is_err());
        assert!(ExactAnswer::default().check(&serde_json::json!({"prompt": "x"})).unwrap_err().contains("answer"));
    }
}
