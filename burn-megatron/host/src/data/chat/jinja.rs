//! Chat templates: Jinja with what transformers adds (`transformers/utils/chat_template_utils.py`).

use std::ffi::CString;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};

use super::python::{Dumps, print};
use super::texts::with_texts;
use crate::local_time::local_time;

/// Unicode's noncharacters are for use inside a program: no text has them.
const START: char = '\u{fdd0}';
const END: char = '\u{fdd1}';

/// The filter that marks what a generation block has rendered.
const FILTER: &str = "assistant_tokens";
const NAME: &str = "chat_template";

/// A compiled template.
#[derive(Debug)]
pub(super) struct Template {
    environment: Environment<'static>,
    /// Whether it has `{% generation %}` blocks.
    pub marks_assistant: bool,
    /// Words in angle brackets and bars, such as `<|im_end|>`, that it writes.
    pub special: Vec<String>,
}

/// What a template made of one conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Rendered {
    pub text: String,
    /// Byte ranges of the text that generation blocks have rendered.
    pub assistant: Vec<std::ops::Range<usize>>,
}

impl Template {
    /// Compiles a template. Fails if its syntax is wrong.
    pub fn new(source: &str) -> Result<Self, Error> {
        // Jinja writes every newline as it writes its own.
        let (rewritten, marks_assistant) = generation_blocks(&source.replace("\r\n", "\n").replace('\r', "\n"));
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_formatter(|out: &mut Output, _: &State, value: &Value| Ok(out.write_str(&print(value))?));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter(FILTER, |text: String| format!("{START}{text}{END}"));
        environment.add_filter("tojson", to_json);
        environment.add_test("iterable", is_iterable);
        environment.add_test("sequence", is_sequence);
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_function("strftime_now", strftime_now);
        environment.add_template_owned(NAME, rewritten)?;
        Ok(Self { environment, marks_assistant, special: special_words(source) })
    }

    /// Names that it takes from its surroundings.
    pub fn variables(&self) -> Vec<String> {
        let template = self.environment.get_template(NAME).expect("it was added");
        let mut names: Vec<String> = template.undeclared_variables(false).into_iter().collect();
        names.sort();
        names
    }

    /// Renders a conversation. The error says what the template raises.
    pub fn render(&self, context: &Value) -> Result<Rendered, Error> {
        let marked = self.environment.get_template(NAME)?.render(with_texts(context))?;
        Ok(spans(&marked))
    }
}

/// Replaces `{% generation %}` by a filter block, which trims white space around it alike, and says whether there is one.
fn generation_blocks(source: &str) -> (String, bool) {
    let (mut out, mut rest, mut found) = (String::with_capacity(source.len()), source, false);
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let body = tag.trim_start_matches(['-', '+']);
        let signs = &tag[..tag.len() - body.len()];
        let word = body.trim_start();
        let spaces = &body[..body.len() - word.len()];
        let block = [("endgeneration", "endfilter".to_string()), ("generation", format!("filter {FILTER}"))];
        let ends = |after: &str| after.trim_start().trim_start_matches(['-', '+']).starts_with("%}");
        let known = block.iter().find(|(name, _)| word.strip_prefix(name).is_some_and(ends));
        rest = match known {
            Some((name, by)) => {
                found = true;
                out.extend([signs, spaces, by]);
                &word[name.len()..]
            }
            None => tag,
        };
    }
    out.push_str(rest);
    (out, found)
}

/// The text without marks, and the ranges between them.
fn spans(marked: &str) -> Rendered {
    let (mut text, mut assistant, mut open) = (String::with_capacity(marked.len()), Vec::new(), 0);
    for c in marked.chars() {
        match c {
            START => open = text.len(),
            END => assistant.push(open..text.len()),
            c => text.push(c),
        }
    }
    assistant.retain(|range| !range.is_empty());
    Rendered { text, assistant }
}

/// `<|...|>` in a template, each once.
fn special_words(source: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    for (at, _) in source.match_indices("<|") {
        let Some(end) = source[at + 2..].find("|>") else { break };
        let word = &source[at..at + 2 + end + 2];
        let is_name = |c: char| c.is_ascii_alphanumeric() || "_-./".contains(c);
        if end > 0 && word[2..2 + end].chars().all(is_name) && !words.iter().any(|other| other == word) {
            words.push(word.into());
        }
    }
    words
}

/// What Python's `iter` takes: not `None`, which here is empty.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// What has a length and items in Python: texts and objects too.
fn is_sequence(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String | ValueKind::Undefined)
}

fn to_json(value: Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<String, Error> {
    let indent = match options.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(usize::try_from(indent)?),
        }),
    };
    let separators = match options.get::<Option<Vec<String>>>("separators")? {
        None => None,
        Some(both) => {
            let [item, key]: [String; 2] = both.try_into().map_err(|_| {
                Error::new(ErrorKind::InvalidOperation, "tojson: separators are two strings, such as (', ', ': ')")
            })?;
            Some((item, key))
        }
    };
    let ensure_ascii = match ensure_ascii {
        Some(ascii) => ascii,
        None => options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    Dumps { ensure_ascii, indent, separators, sort_keys }.dump(&value)
}

/// Local time in the format of C's `strftime`, which Python's calls too.
fn strftime_now(format: String) -> Result<String, Error> {
    let refused = |what: &str| Error::new(ErrorKind::InvalidOperation, format!("strftime_now('{format}'): {what}"));
    let c_format = CString::new(format.as_str()).map_err(|_| refused("a zero byte"))?;
    match local_time(&c_format) {
        text if text.is_empty() && !format.is_empty() => Err(refused("no text, or one of more than 511 bytes")),
        text => Ok(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::context;

    fn render(source: &str, context: Value) -> Rendered {
        Template::new(source).unwrap().render(&context).unwrap()
    }

    #[test]
    fn generation_blocks_mark_text_and_trim_space_as_blocks_do() {
        let source = "{% for m in ms %}\n  {%- generation -%}\n {{ m }}!\n{% endgeneration %}\n;\n{% endfor %}";
        let rendered = render(source, context! { ms => ["a", "é"] });
        assert_eq!(rendered.text, "a!\n;\né!\n;\n");
        assert_eq!(rendered.assistant, [0..3, 5..9]);
        let (rewritten, found) = generation_blocks("{% if generation %}x{% endif %}{{ '{% generations %}' }}");
        assert!(!found && rewritten.contains("{% if generation %}"));
    }

    #[test]
    fn templates_have_what_transformers_gives_them() {
        let of = |source| render(source, context! { x => vec![1.0], s => " a</t>b " }).text;
        assert_eq!(of("{{ s.split('</t>')[-1].strip() }}{{ s | trim }}"), "ba</t>b");
        assert_eq!(of("{{ x | tojson(indent=2) }}{{ 'é' | tojson }}"), "[\n  1.0\n]\"é\"");
        assert_eq!(of("{% for i in [1,2,3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"), "1");
        assert_eq!(of("{{ none }}{{ true }}{{ missing }}"), "NoneTrue");
        assert_eq!(
            of("{% set ns = namespace(n=0) %}{% for i in x %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}"),
            "1"
        );
        assert_eq!(of("a\r\nb\rc"), "a\nb\nc");
        let tests = "{% for v in [none, missing, 1, s, x, {}] %}{{ v is iterable }}{{ v is sequence }} {% endfor %}";
        assert_eq!(of(tests), "FalseFalse TrueTrue FalseFalse TrueTrue TrueTrue TrueTrue ");
        let year: u32 = of("{{ strftime_now('%Y') }}").parse().unwrap();
        assert!(year >= 2025);
        let error = Template::new("\n{{ raise_exception('roles must alternate') }}").unwrap();
        let error = error.render(&context! {}).unwrap_err().to_string();
        assert!(error.contains("roles must alternate") && error.contains(":2"), "{error}");
    }

    /// What Jinja's `str` makes of `{"type": ["integer", None], "b": True}`.
    #[test]
    fn filters_and_concatenation_write_lists_as_python_does() {
        let tool: Value = serde_json::from_str(r#"{"type": ["integer", null], "b": true}"#).unwrap();
        let of = |source| render(source, context! { tool }).text;
        assert_eq!(of("{{ tool.type | upper }}{{ tool.type | string }}"), "['INTEGER', NONE]['integer', None]");
        assert_eq!(of("{{ tool ~ '' }}"), "{'type': ['integer', None], 'b': True}");
        assert_eq!(of("{{ [tool.type] | join }}{{ tool.b ~ '' }}"), "['integer', None]True");
        let still = "{% for k, v in tool.items() %}{{ k }}{% endfor %}{{ tool.type[-1] }}{{ tool.type[:1] | length }}\
                     {{ tool is mapping and tool.type is sequence and 'b' in tool and tool.type == ['integer', none] }}\
                     {{ tool | tojson }}";
        assert_eq!(of(still), r#"typebNone1True{"type": ["integer", null], "b": true}"#);
    }

    #[test]
    fn special_words_are_found_once() {
        let words = special_words("{{ '<|a|>' }}<|b_1|><|a|>{% if a <|b %}|>");
        assert_eq!(words, ["<|a|>", "<|b_1|>"]);
    }
}
