//! Which bytes may follow in a JSON text of a schema: what a model may write next, if its answer must be such a text.
//!
//! A [`JsonGrammar`] is a pushdown automaton over bytes. Where JSON has white space, a line break and indentation are allowed, but
//! none before the value and behind it. Numbers have at most 18 digits in each part, and two of an exponent; those between bounds
//! have no exponent, and strings of a pattern no escapes with digits. Keys come in any order. Those that a schema names come once, written as serde_json writes them; others have no escapes, and whether they come
//! again is not looked at. Arrays and objects are at most `MOST_DEPTH` deep.

mod alternatives;
mod bounds;
mod character;
mod ecma;
mod expressions;
mod formats;
mod guide;
mod heights;
mod keys;
mod kinds;
mod machine;
mod number;
mod pattern;
mod schema;
mod stack;
#[cfg(test)]
mod tests;
mod vocabulary;

pub use guide::Guide;
pub use vocabulary::{TokenSet, TokenTexts};

use std::sync::Arc;

use self::pattern::Pattern;
use self::stack::Stack;

/// Most arrays and objects in one another.
const MOST_DEPTH: usize = 100;

/// Most readings of a text that are followed where a schema is ambiguous: later ones are forgotten. What is written is legal in
/// those that are left.
const MOST_READINGS: usize = 64;

/// The JSON texts that are legal.
///
/// ```
/// use std::sync::Arc;
///
/// use host::json_grammar::{Guide, JsonGrammar, TokenTexts};
///
/// let schema = serde_json::json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
/// let grammar = JsonGrammar::of_schema(&schema)?;
/// assert!(grammar.is_whole(br#"{"n": -7}"#) && !grammar.is_whole(br#"{"n": -7.5}"#));
/// let tokens = TokenTexts::new(["{\"n", "\":", "1", "}", "a"].map(|text| text.as_bytes().to_vec()));
/// // What may follow `{"n":1`, and whether the text may end.
/// let (next, may_end) = Guide::new(grammar, Arc::new(tokens)).next(&[0, 1, 2]);
/// assert_eq!((next.iter().collect(), may_end), (vec![2, 3], false));
/// # Ok::<(), String>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct JsonGrammar {
    nodes: Vec<Node>,
    /// Of each node: arrays and objects in one another in the text that has the fewest.
    heights: Vec<usize>,
    root: usize,
}

/// What a value must be; other nodes are named by their numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Node {
    /// Any value.
    Any,
    /// One of these texts, which are in order.
    Texts(Vec<Vec<u8>>),
    /// A string of so many characters.
    Text {
        min: u32,
        max: u32,
    },
    Number {
        is_integer: bool,
    },
    /// A string, or a number, whose characters follow a regular expression.
    Pattern {
        pattern: Arc<Pattern>,
        is_string: bool,
    },
    Array {
        items: usize,
        min: u32,
        max: u32,
    },
    /// Keys in order, those that must be there as bits, and the value of other keys.
    Object {
        keys: Vec<Key>,
        needed: u128,
        others: Option<usize>,
    },
    /// One of several, none of which is a choice.
    Choice(Vec<usize>),
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    /// As it is written between quotes.
    text: Vec<u8>,
    value: usize,
}

/// Numbers of the nodes that every grammar has.
const ANY: usize = 0;
const ANY_OBJECT: usize = 1;
const ANY_ARRAY: usize = 2;

impl JsonGrammar {
    fn new() -> Self {
        let object = Node::Object { keys: Vec::new(), needed: 0, others: Some(ANY) };
        let array = Node::Array { items: ANY, min: 0, max: stack::NO_LIMIT };
        Self { nodes: vec![Node::Any, object, array], heights: vec![0, 1, 1], root: ANY }
    }

    /// Any object.
    pub fn object() -> Self {
        Self { root: ANY_OBJECT, ..Self::new() }
    }

    /// The texts of a JSON schema: `type`, `properties`, `required`, `additionalProperties`, `items`, `minItems`, `maxItems`,
    /// `minLength`, `maxLength`, `pattern`, `format`, `minimum`, `maximum`, `exclusiveMinimum`, `exclusiveMaximum`,
    /// `multipleOf`, `enum`, `const`, `anyOf`, `oneOf` (as `anyOf`), `allOf` of one
    /// schema, and `$ref` into the schema.
    ///
    /// # Errors
    /// Names the place in the schema, and the keyword that is not among them, or wrong, or not supported next to another.
    pub fn of_schema(schema: &serde_json::Value) -> Result<Self, String> {
        schema::compile(schema)
    }

    /// Whether a text is legal.
    pub fn is_whole(&self, text: &[u8]) -> bool {
        self.may_end_in(&self.after(text.iter().copied()))
    }

    fn may_end_in(&self, stacks: &[Stack]) -> bool {
        stacks.iter().any(|stack| self.may_end(stack))
    }

    /// The states after a text; none if it is no beginning of a legal one.
    fn after(&self, text: impl Iterator<Item = u8>) -> Vec<Stack> {
        self.resume(vec![self.start()], text)
    }

    fn resume(&self, stacks: Vec<Stack>, text: impl Iterator<Item = u8>) -> Vec<Stack> {
        text.fold(stacks, |stacks, byte| self.step(&stacks, byte))
    }

    fn step(&self, stacks: &[Stack], byte: u8) -> Vec<Stack> {
        let mut all = Vec::with_capacity(stacks.len());
        stacks.iter().for_each(|stack| self.push(stack, byte, &mut all));
        if all.len() < 2 {
            return all;
        }
        let mut next: Vec<Stack> = Vec::with_capacity(all.len());
        for stack in all {
            if next.len() < MOST_READINGS && !next.contains(&stack) {
                next.push(stack);
            }
        }
        next
    }
}
