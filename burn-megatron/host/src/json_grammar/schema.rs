//! From a JSON schema to the nodes of a grammar.

use std::collections::{HashMap, VecDeque};

use serde_json::{Map, Value};

use super::{ANY, JsonGrammar, MOST_DEPTH, Node};

/// Keywords that say nothing of which values are legal.
const ANNOTATIONS: [&str; 12] = [
    "$schema",
    "$id",
    "$defs",
    "definitions",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
];

/// Keywords of each kind of value.
pub(super) const KEYWORDS: [(&str, &[&str]); 5] = [
    ("object", &["properties", "required", "additionalProperties"]),
    ("array", &["items", "minItems", "maxItems"]),
    ("string", &["minLength", "maxLength", "pattern", "format"]),
    ("number", &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    ("", &["type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"]),
];

/// Most parts of a schema.
const MOST_PARTS: usize = 10_000;
/// Most parts of a schema in one another, without those that are referred to.
const MOST_NESTED: usize = 64;

pub(super) fn compile(schema: &Value) -> Result<JsonGrammar, String> {
    let mut compiler = Compiler {
        schema,
        grammar: JsonGrammar::new(),
        parts: 0,
        ways: 0,
        known: HashMap::new(),
        references: HashMap::new(),
        open: VecDeque::new(),
        path: vec!["#".into()],
    };
    let root = compiler.node(schema)?;
    // One after the other, however long a chain of references is.
    while let Some((name, node)) = compiler.open.pop_front() {
        compiler.path = vec![format!("#{name}")];
        let wrong = compiler.wrong("it is referred to, and not in the schema");
        let found = compiler.node(schema.pointer(&name).ok_or(wrong)?)?;
        compiler.grammar.nodes[node] = Node::Choice(vec![found]);
    }
    let Compiler { mut grammar, references, .. } = compiler;
    grammar.flatten(&references)?;
    grammar.root = root;
    grammar.measure();
    match grammar.heights[root] {
        ..=MOST_DEPTH => Ok(grammar),
        _ => Err(format!("#: every text of it has more than {MOST_DEPTH} arrays and objects in one another")),
    }
}

pub(super) struct Compiler<'a> {
    schema: &'a Value,
    pub(super) grammar: JsonGrammar,
    parts: usize,
    /// From states of patterns to others.
    pub(super) ways: usize,
    /// Nodes that are there already.
    known: HashMap<Node, usize>,
    /// Nodes of what was referred to, by the place in the schema.
    references: HashMap<String, usize>,
    /// Those that are not looked at yet.
    open: VecDeque<(String, usize)>,
    /// Where in the schema the part is that is looked at.
    path: Vec<String>,
}

impl Compiler<'_> {
    pub(super) fn wrong(&self, what: impl std::fmt::Display) -> String {
        format!("{}: {what}", self.path.join("/"))
    }

    pub(super) fn add(&mut self, node: Node) -> Result<usize, String> {
        if let Some(known) = self.known.get(&node) {
            return Ok(*known);
        }
        self.known.insert(node.clone(), self.grammar.nodes.len());
        self.grammar.nodes.push(node);
        Ok(self.grammar.nodes.len() - 1)
    }

    /// The schema under a key of this one.
    pub(super) fn inner(&mut self, key: &str, schema: &Value) -> Result<usize, String> {
        self.path.push(key.into());
        let node = self.node(schema)?;
        self.path.pop();
        Ok(node)
    }

    fn node(&mut self, schema: &Value) -> Result<usize, String> {
        self.parts += 1;
        if self.parts > MOST_PARTS {
            return Err(self.wrong(format!("the schema has more than {MOST_PARTS} parts")));
        }
        if self.path.len() > MOST_NESTED {
            return Err(
                self.wrong(format!("the schema has more than {MOST_NESTED} parts in one another; $ref may help"))
            );
        }
        let keys = match schema {
            Value::Bool(true) => return Ok(ANY),
            Value::Bool(false) => return Err(self.wrong("the schema `false` is not supported")),
            Value::Object(keys) => keys,
            other => return Err(self.wrong(format!("{other} is no schema; an object is needed"))),
        };
        let is_known = |key: &str| KEYWORDS.iter().any(|(_, known)| known.contains(&key));
        let used: Vec<&str> = keys.keys().map(String::as_str).filter(|key| !ANNOTATIONS.contains(key)).collect();
        if let Some(key) = used.iter().find(|key| !is_known(key)) {
            let legal: Vec<&str> = KEYWORDS.iter().flat_map(|(_, known)| known.iter().copied()).collect();
            return Err(self.wrong(format!("the keyword `{key}` is not supported; legal: {}", legal.join(", "))));
        }
        // Each of these says all of a value; of the others only `type` may come with a list of values.
        let whole = [("$ref", ""), ("const", "type"), ("enum", "type"), ("anyOf", ""), ("oneOf", ""), ("allOf", "")];
        for (key, with) in whole {
            let Some(value) = keys.get(key) else { continue };
            if let Some(other) = used.iter().find(|other| **other != key && **other != with) {
                return Err(self.wrong(format!("`{other}` next to `{key}` is not supported; leave one of them out")));
            }
            return match key {
                "$ref" => self.reference(value),
                "const" => self.values(std::slice::from_ref(value), keys),
                "enum" => {
                    let values = value.as_array().filter(|values| !values.is_empty());
                    self.values(values.ok_or_else(|| self.wrong("enum: a list of values is needed"))?, keys)
                }
                _ => self.choice(key, value),
            };
        }
        self.of_kinds(keys, &used)
    }

    fn choice(&mut self, key: &str, value: &Value) -> Result<usize, String> {
        let choices = value.as_array().filter(|all| !all.is_empty());
        let choices = choices.ok_or_else(|| self.wrong(format!("{key}: a list of schemas is needed")))?;
        // Programs write it around one schema to say more of it.
        if key == "allOf" && choices.len() > 1 {
            return Err(self.wrong("allOf of several schemas is not supported; write them as one"));
        }
        let mut nodes = Vec::new();
        for (at, choice) in choices.iter().enumerate() {
            nodes.push(self.inner(&format!("{key}/{at}"), choice)?);
        }
        self.one_of(nodes)
    }

    /// One of several, where all texts are one node: as many as there may be.
    pub(super) fn one_of(&mut self, nodes: Vec<usize>) -> Result<usize, String> {
        let of = |node: &usize| match &self.grammar.nodes[*node] {
            Node::Texts(texts) => Some(texts),
            _ => None,
        };
        let mut texts: Vec<Vec<u8>> = nodes.iter().filter_map(of).flatten().cloned().collect();
        let mut others: Vec<usize> = nodes.iter().copied().filter(|node| of(node).is_none()).collect();
        if !texts.is_empty() {
            texts.sort_unstable();
            texts.dedup();
            others.push(self.add(Node::Texts(texts))?);
        }
        if others.len() == 1 { Ok(others[0]) } else { self.add(Node::Choice(others)) }
    }

    /// Those of some values that are of the type, if there is one.
    fn values(&mut self, values: &[Value], keys: &Map<String, Value>) -> Result<usize, String> {
        let kinds = self.kinds(keys)?;
        let fits = |value: &&Value| kinds.as_ref().is_none_or(|kinds| kinds.iter().any(|kind| is_of(value, kind)));
        let mut texts: Vec<Vec<u8>> = values.iter().filter(fits).map(|value| value.to_string().into_bytes()).collect();
        if texts.is_empty() {
            return Err(self.wrong("none of the values is of the type"));
        }
        texts.sort_unstable();
        texts.dedup();
        self.add(Node::Texts(texts))
    }

    /// What `#/$defs/name` stands for, which may refer to itself: a place for it.
    fn reference(&mut self, reference: &Value) -> Result<usize, String> {
        let wrong = || self.wrong(format!("$ref: {reference} is not found in the schema"));
        let name = reference.as_str().and_then(|name| name.strip_prefix('#')).ok_or_else(wrong)?;
        if let Some(node) = self.references.get(name) {
            return Ok(*node);
        }
        self.schema.pointer(name).ok_or_else(wrong)?;
        let node = self.grammar.nodes.len();
        self.grammar.nodes.push(Node::Choice(Vec::new()));
        self.references.insert(name.into(), node);
        self.open.push_back((name.into(), node));
        Ok(node)
    }
}

/// Whether a value is of a type.
fn is_of(value: &Value, kind: &str) -> bool {
    match value {
        Value::Null => kind == "null",
        Value::Bool(_) => kind == "boolean",
        Value::String(_) => kind == "string",
        Value::Array(_) => kind == "array",
        Value::Object(_) => kind == "object",
        Value::Number(number) => {
            let is_whole = number.as_f64().is_some_and(|number| number.fract() == 0.0);
            kind == "number" || kind == "integer" && is_whole
        }
    }
}
