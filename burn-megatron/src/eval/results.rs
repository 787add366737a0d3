//! From what a model says to metrics, as the harness has them (`lm_eval/api/task.py`, `process_results`;
//! `lm_eval/api/metrics.py`).

use std::fmt::Write;

use serde_json::{Value, json};

use super::likelihood::Scored;
use super::run::Answers;
use super::task::{Kind, Question, Task};
use super::text::{ExactMatch, before};
use super::work::Work;

/// A number about a task.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Metric {
    /// The harness's name.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// Its standard error, of means of at least two samples.
    pub stderr: Option<f64>,
}

/// What came out of a task.
#[derive(Clone, Debug, PartialEq)]
pub struct TaskResult {
    /// Name of the task.
    pub name: String,
    /// Kind of its questions.
    pub kind: Kind,
    /// Number of its questions.
    pub samples: usize,
    /// All questions together.
    pub metrics: Vec<Metric>,
    /// An object for each question.
    pub lines: Vec<Value>,
}

/// The metrics of all tasks. Panics if `work` or `answers` are those of other tasks.
pub fn results(tasks: &[Task], work: &Work, answers: &Answers, compare: ExactMatch) -> Vec<TaskResult> {
    let (mut counts, mut scores, mut texts) = (work.counts.iter(), &answers.scores[..], answers.texts.iter());
    let mut requests = &work.requests[..];
    let mut result = |task: &Task| {
        let (mut lines, mut table) = (Vec::new(), Columns::default());
        for (index, (line, question)) in task.questions.iter().enumerate() {
            let count = *counts.next().expect("as many counts as questions");
            let own;
            (own, scores) = scores.split_at(count);
            let tokens = requests[..count].iter().map(|request| request.scored).sum();
            requests = &requests[count..];
            let mut sample = json!({"task": task.name, "kind": task.kind.to_string(), "index": index, "line": line});
            let fields = match question {
                Question::MultipleChoice { continuations, answers, .. } => {
                    multiple_choice(own, continuations, answers, &mut table)
                }
                Question::LogLikelihood { .. } => log_likelihood(own[0], tokens, &mut table),
                Question::Document { text } => document(own, text, tokens, &mut table),
                Question::Generate { targets, until, .. } => {
                    let text = texts.next().expect("as many texts as prompts");
                    generated(before(text, until), targets, compare, &mut table)
                }
            };
            let (Value::Object(sample), Value::Object(fields)) = (&mut sample, fields) else {
                unreachable!("both are objects")
            };
            sample.extend(fields);
            lines.push(Value::Object(sample.clone()));
        }
        let samples = task.questions.len();
        TaskResult { name: task.name.clone(), kind: task.kind, samples, metrics: table.metrics(task.kind), lines }
    };
    tasks.iter().map(&mut result).collect()
}

/// What is summed over the questions of a task.
#[derive(Default)]
struct Columns {
    acc: Vec<f64>,
    acc_norm: Vec<f64>,
    acc_bytes: Vec<f64>,
    exact_match: Vec<f64>,
    log_likelihood: Vec<f64>,
    tokens: usize,
    words: usize,
    bytes: usize,
}

impl Columns {
    fn metrics(&self, kind: Kind) -> Vec<Metric> {
        let total: f64 = self.log_likelihood.iter().sum();
        let plain = |name, value| Metric { name, value, stderr: None };
        match kind {
            Kind::MultipleChoice => {
                vec![mean("acc", &self.acc), mean("acc_norm", &self.acc_norm), mean("acc_bytes", &self.acc_bytes)]
            }
            Kind::LogLikelihood => {
                let per_question = total / self.log_likelihood.len() as f64;
                vec![mean("acc", &self.acc), plain("perplexity", (-per_question).exp())]
            }
            Kind::Generate => vec![mean("exact_match", &self.exact_match)],
            Kind::Document => {
                let per = |count: usize| -total / count as f64;
                vec![
                    plain("token_perplexity", per(self.tokens).exp()),
                    plain("word_perplexity", per(self.words).exp()),
                    plain("byte_perplexity", per(self.bytes).exp()),
                    plain("bits_per_byte", per(self.bytes) / std::f64::consts::LN_2),
                ]
            }
        }
    }
}

/// The mean and its standard error, from the deviations of the sample.
fn mean(name: &'static str, values: &[f64]) -> Metric {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let stderr = (values.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt());
    Metric { name, value: mean, stderr }
}

fn multiple_choice(scores: &[Scored], continuations: &[String], answers: &[usize], table: &mut Columns) -> Value {
    // The space before a continuation separates it from the context; its length does not count in the harness.
    let per = |length: &dyn Fn(&str) -> usize| {
        let each = scores.iter().zip(continuations);
        largest(each.map(|(score, text)| score.log_likelihood / length(text.trim_start()) as f64))
    };
    let choices = [largest(scores.iter().map(|s| s.log_likelihood)), per(&|text| text.chars().count()), per(&str::len)];
    let right = choices.map(|choice| f64::from(u8::from(answers.contains(&choice))));
    table.acc.push(right[0]);
    table.acc_norm.push(right[1]);
    table.acc_bytes.push(right[2]);
    json!({
        "loglikelihood": scores.iter().map(|score| score.log_likelihood).collect::<Vec<_>>(),
        "is_greedy": scores.iter().map(|score| score.is_greedy).collect::<Vec<_>>(),
        "answer": answers,
        "prediction": choices[0],
        "acc": right[0],
        "acc_norm": right[1],
        "acc_bytes": right[2],
    })
}

/// The first of the largest.
fn largest(values: impl Iterator<Item = f64>) -> usize {
    let best = values.enumerate().fold(
        (0, f64::NEG_INFINITY),
        |best, (index, value)| {
            if value > best.1 { (index, value) } else { best }
        },
    );
    best.0
}

fn log_likelihood(score: Scored, tokens: usize, table: &mut Columns) -> Value {
    let acc = f64::from(u8::from(score.is_greedy));
    table.acc.push(acc);
    table.log_likelihood.push(score.log_likelihood);
    json!({"loglikelihood": score.log_likelihood, "is_greedy": score.is_greedy, "tokens": tokens, "acc": acc})
}

fn document(scores: &[Scored], text: &str, tokens: usize, table: &mut Columns) -> Value {
    let total: f64 = scores.iter().map(|score| score.log_likelihood).sum();
    let (words, bytes) = (words(text), text.len());
    table.log_likelihood.push(total);
    table.tokens += tokens;
    table.words += words;
    table.bytes += bytes;
    json!({"loglikelihood": total, "tokens": tokens, "words": words, "bytes": bytes})
}

/// As the harness counts them: `len(re.split(r"\s+", text))`.
fn words(text: &str) -> usize {
    let mut before = false;
    let runs = text.chars().filter(|c| {
        let starts = c.is_whitespace() && !before;
        before = c.is_whitespace();
        starts
    });
    runs.count() + 1
}

fn generated(answer: &str, targets: &[String], compare: ExactMatch, table: &mut Columns) -> Value {
    let exact_match = f64::from(u8::from(compare.matches(answer, targets)));
    table.exact_match.push(exact_match);
    json!({"output": answer, "target": targets, "exact_match": exact_match})
}

/// A line for each metric.
pub fn table(results: &[TaskResult]) -> String {
    let width = results.iter().map(|result| result.name.len()).max().unwrap_or(0).max(4);
    let mut text =
        format!("{:width$}  {:21}  {:>7}  {:16}  {:>11}  stderr\n", "task", "kind", "samples", "metric", "value");
    for result in results {
        for metric in &result.metrics {
            let stderr = metric.stderr.map_or("-".into(), |stderr| format!("{stderr:.4}"));
            let TaskResult { name, kind, samples, .. } = result;
            let _ = writeln!(
                text,
                "{name:width$}  {kind:21}  {samples:7}  {:16}  {:11.4}  {stderr}",
                metric.name, metric.value
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(log_likelihood: f64) -> Scored {
        Scored { log_likelihood, is_greedy: false }
    }

    #[test]
    fn lengths_decide_otherwise() {
        let mut table = Columns::default();
        // Sums: the first. Per character (2, 8, 4): the second. Per byte (2, 8, 12): the third.
        let continuations = [" ab".to_string(), " abcdefgh".into(), " \u{732b}\u{732b}\u{732b}\u{732b}".into()];
        let scores = [scored(-2.0), scored(-4.0), scored(-4.5)];
        let line = multiple_choice(&scores, &continuations, &[2], &mut table);
        assert_eq!((table.acc[0], table.acc_norm[0], table.acc_bytes[0]), (0.0, 0.0, 1.0));
        assert_eq!(line["prediction"], 0);
        multiple_choice(&scores, &continuations, &[1], &mut table);
        assert_eq!(table.acc_norm, [0.0, 1.0]);
        let metrics = table.metrics(Kind::MultipleChoice);
        assert_eq!(metrics[1].value, 0.5);
        assert!((metrics[1].stderr.unwrap() - 0.5).abs() < 1e-12, "two samples, 0 and 1");
    }

    #[test]
    fn perplexities_are_per_token_word_and_byte() {
        let mut table = Columns::default();
        document(&[scored(-3.0), scored(-1.0)], "ab cd", 4, &mut table);
        document(&[scored(-2.0)], "e", 2, &mut table);
        let metrics = table.metrics(Kind::Document);
        let value = |name: &str| metrics.iter().find(|metric| metric.name == name).unwrap().value;
        assert!((value("token_perplexity") - 1f64.exp()).abs() < 1e-12);
        assert!((value("word_perplexity") - 2f64.exp()).abs() < 1e-12);
        assert!((value("bits_per_byte") - 1.0 / 2f64.ln()).abs() < 1e-12);
        assert!((value("byte_perplexity").log2() - value("bits_per_byte")).abs() < 1e-12);
        assert_eq!([words(""), words(" a  b\n"), words("a b")], [1, 4, 2]);
    }

    #[test]
    fn the_first_of_equals_is_chosen() {
        assert_eq!(largest([1.0, 3.0, 3.0].into_iter()), 1);
        assert_eq!(largest([f64::NAN, -1.0].into_iter()), 1);
    }
}
