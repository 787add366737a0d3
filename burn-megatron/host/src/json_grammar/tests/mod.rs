//! Texts that are legal and those that are not, and the tokens that may follow.

mod guide;
mod large;
mod patterns;
mod random;
mod refused;
mod strings;

use std::sync::Arc;

use serde_json::{Value, json};

use super::*;

fn of(schema: Value) -> JsonGrammar {
    JsonGrammar::of_schema(&schema).unwrap()
}

fn refused(schema: Value) -> String {
    JsonGrammar::of_schema(&schema).unwrap_err()
}

/// Every beginning of a legal text may continue.
fn takes(grammar: &JsonGrammar, text: &str) -> bool {
    let bytes = text.as_bytes();
    let begins = |end: usize| !grammar.after(bytes[..end].iter().copied()).is_empty();
    grammar.is_whole(bytes) && (0..bytes.len()).all(begins)
}

#[test]
fn any_object_is_what_a_parser_takes() {
    let grammar = JsonGrammar::object();
    for text in [
        "{}",
        "{ }",
        r#"{"a":1}"#,
        r#"{"a": [1, -0.5e+3, {"b": null}], "": true, "ü": "é\n\u00e9\"☃"}"#,
        "{\n  \"a\": [],\n  \"b\": [ [ ] ]\n}",
        r#"{"a":0,"b":10,"c":-1E5,"d":false}"#,
    ] {
        assert!(serde_json::from_str::<Value>(text).is_ok() && takes(&grammar, text), "{text}");
    }
    for text in [
        "",
        "[]",
        "1",
        "{",
        "{]",
        r#"{"a"}"#,
        r#"{"a":}"#,
        r#"{"a":1,}"#,
        r#"{"a":01}"#,
        r#"{"a":1.}"#,
        r#"{"a":.5}"#,
        r#"{"a":tru}"#,
        r#"{"a":"x}"#,
        r#"{"a":"\x"}"#,
        "{\"a\":\"\n\"}",
        r#"{"a":1}}"#,
        r#"{'a':1}"#,
        r#"{"a":[1,]}"#,
        r#"{"a":-}"#,
        r#"{"a":1e}"#,
    ] {
        assert!(serde_json::from_str::<Value>(text).map_or(true, |value| !value.is_object()), "{text} is one");
        assert!(!grammar.is_whole(text.as_bytes()), "{text}");
    }
    // Indentation, and no more.
    for spaces in [" ".repeat(99), "\n\n".into(), " \n".into(), "\r".into()] {
        assert!(grammar.after(format!("{{{spaces}").bytes()).is_empty(), "{spaces:?}");
    }
}

#[test]
fn keys_are_those_of_the_schema_in_any_order_each_once() {
    let grammar = of(
        json!({"type": "object", "required": ["name", "age"], "additionalProperties": false, "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3}, "age": {"type": "integer"}, "more": {"type": "boolean"}}}),
    );
    assert!(takes(&grammar, r#"{"name": "Bo", "age": 7}"#));
    assert!(takes(&grammar, r#"{"more": true, "age": -7, "name": "é☃a"}"#));
    for text in [
        r#"{"name": "Bo"}"#,
        r#"{"name": "", "age": 7}"#,
        r#"{"name": "Bobo", "age": 7}"#,
        r#"{"name": "Bo", "age": 7.5}"#,
        r#"{"name": "Bo", "age": 7, "age": 8}"#,
        r#"{"name": "Bo", "age": 7, "other": 1}"#,
        r#"{"nam": "Bo", "age": 7}"#,
        r#"{"name": "Bo", "age": "7"}"#,
    ] {
        assert!(!grammar.is_whole(text.as_bytes()), "{text}");
    }
    let open = of(json!({"properties": {"n": {"type": "null"}}, "additionalProperties": {"type": "number"}}));
    assert!(takes(&open, r#"{"x": 1.5, "n": null, "nn": 2}"#) && !open.is_whole(br#"{"n": 1}"#));
    assert!(takes(&of(json!({"required": ["a"]})), r#"{"b": 1, "a": []}"#));
}

#[test]
fn arrays_enums_choices_and_references() {
    let grammar = of(json!({"type": "array", "items": {"enum": ["red", 1, {"a": 1}]}, "minItems": 1, "maxItems": 2}));
    assert!(takes(&grammar, r#"["red"]"#) && takes(&grammar, r#"[1, {"a":1}]"#));
    assert!(!["[]", r#"["red",1,1]"#, r#"["re"]"#].iter().any(|text| grammar.is_whole(text.as_bytes())));
    let grammar = of(json!({"anyOf": [{"type": "string"}, {"type": ["null", "integer"]}, {"const": true}]}));
    assert!([r#""x""#, "null", "42", "true"].iter().all(|text| takes(&grammar, text)) && !grammar.is_whole(b"4.5"));
    // A list that holds itself.
    let list = json!({"$ref": "#/$defs/list", "$defs": {"list": {"type": "object", "required": ["next"],
        "additionalProperties": false, "properties": {"next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]}}}}});
    let grammar = of(list);
    assert!(takes(&grammar, r#"{"next": {"next": {"next": null}}}"#) && !grammar.is_whole(br#"{"next": 1}"#));
    assert!(
        takes(&of(json!(true)), "[1]")
            && takes(&of(json!({})), "\"a\"")
            && takes(&of(json!({"type": "array"})), "[{}]")
    );
}

/// The tokens that may follow are those with which the text still is the beginning of a legal one.
#[test]
fn tokens_are_taken_whole() {
    let schema = json!({"type": "object", "properties": {"ab": {"enum": ["x", "xy"]}}, "required": ["ab"],
        "additionalProperties": false});
    let texts = ["{", "{\"", "{\"a", "{\"b", "a", "ab", "ab\"", "b\":", "\":\"x", "\"}", "y\"}", "}", "", " ", "z"];
    let tokens = TokenTexts::new(texts.map(|text| text.as_bytes().to_vec()));
    let guide = Guide::new(of(schema), Arc::new(tokens));
    let mut written: Vec<i64> = Vec::new();
    for (token, expected) in [(1, vec![0, 1, 2]), (5, vec![4, 5, 6]), (8, vec![8]), (9, vec![9, 10]), (12, vec![])] {
        let (next, may_end) = guide.next(&written);
        assert_eq!((next.iter().collect(), may_end), (expected, token == 12), "{written:?}");
        written.push(token);
    }
}
