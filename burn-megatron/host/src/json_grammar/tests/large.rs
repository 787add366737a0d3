//! Schemas and texts that would take too long, or too much memory.

use super::*;

/// `{"a0": of(1), "a1": of(2), ...}` and the last of them null.
fn chain(count: usize, of: impl Fn(Value) -> Value) -> Value {
    let reference = |at: usize| json!({"$ref": format!("#/$defs/a{at}")});
    let mut schema = reference(0);
    for at in 0..count {
        schema["$defs"][format!("a{at}")] = of(reference(at + 1));
    }
    schema["$defs"][format!("a{count}")] = json!({"type": "null"});
    schema
}

#[test]
fn long_chains_of_references_are_followed() {
    let alias = of(chain(5000, |next| next));
    assert!(takes(&alias, "null") && !alias.is_whole(b"1"));
    let twice = of(chain(3000, |next| json!({"anyOf": [next, next]})));
    assert!(takes(&twice, "null") && !twice.is_whole(b"1"));
    let nested = of(chain(99, |next| json!({"type": "array", "items": next, "minItems": 1})));
    assert!(takes(&nested, &format!("{}null{}", "[".repeat(99), "]".repeat(99))));
    let deep = chain(3000, |next| json!({"type": "array", "items": next, "minItems": 1}));
    assert!(refused(deep).contains("more than 100 arrays and objects in one another"));
    assert!(refused(chain(20_000, |next| next)).contains("more than 10000 parts"));
    let inline = (0..100).fold(json!({}), |inner, _| json!({"items": inner}));
    assert!(refused(inline).contains("more than 64 parts in one another"));
}

/// Readings that have become the same are one.
#[test]
fn readings_of_a_text_stay_few() {
    let numbers = of(json!({"type": "array", "items": {"type": ["integer", "number"]}}));
    let text = format!("[{}1]", "1, ".repeat(500));
    assert!(numbers.is_whole(text.as_bytes()));
    assert!((0..text.len()).all(|end| numbers.after(text[..end].bytes()).len() <= 2));
    // Each level doubles them, for good.
    let tree = json!({"$ref": "#/$defs/t", "$defs": {"t": {"anyOf": [
        {"properties": {"a": {"$ref": "#/$defs/t"}}, "additionalProperties": false},
        {"properties": {"a": {"$ref": "#/$defs/t"}, "b": {}}, "additionalProperties": false}]}}});
    let (tree, text) = (of(tree), format!("{}{{{}", "{\"a\":".repeat(90), "}".repeat(91)));
    assert!(tree.is_whole(text.as_bytes()));
    assert!((0..text.len()).all(|end| tree.after(text[..end].bytes()).len() <= MOST_READINGS));
    let kinds: Vec<Value> = (0..70).map(|length| json!({"type": "string", "minLength": length})).collect();
    assert!(refused(json!({"anyOf": kinds})).contains("70 alternatives of a value; at most 64 are supported"));
    // Texts are one alternative, however many they are.
    let consts: Vec<Value> = (0..3000).map(|number| json!({"const": number})).collect();
    let consts = of(json!({"anyOf": consts}));
    assert!(takes(&consts, "2999") && takes(&consts, "29") && !consts.is_whole(b"3000"));
    assert_eq!(consts.after("2".bytes()).len(), 2);
}

/// A text does not become so deep that it cannot be closed.
#[test]
fn the_depth_has_a_limit() {
    let object = JsonGrammar::object();
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let text = |depth: usize| format!("{{\"a\":{}1{}}}", open.repeat(depth), close.repeat(depth));
        assert!(object.is_whole(text(99).as_bytes()) && !object.is_whole(text(100).as_bytes()));
        assert!(object.after(format!("{{\"a\":{}", open.repeat(99)).bytes()).len() == 1);
    }
    // In place of another list, the end.
    let list = of(json!({"type": "object", "required": ["next"], "additionalProperties": false,
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}));
    let before = format!("{}{{\"next\":", "{\"next\":".repeat(99));
    let follows = |byte: u8| !list.after(before.bytes().chain([byte])).is_empty();
    assert!(follows(b'n') && !follows(b'{'));
    assert!(list.is_whole(format!("{before}null{}", "}".repeat(100)).as_bytes()));
    let long: String = format!("{{\"a\":{}", "[".repeat(1_000_000));
    assert!(object.after(long.bytes()).is_empty());
}
