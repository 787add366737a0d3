//! Strings, numbers and keys that parsers read as they were meant.

use super::*;

fn begins(grammar: &JsonGrammar, text: &[u8]) -> bool {
    !grammar.after(text.iter().copied()).is_empty()
}

#[test]
fn keys_with_escapes_are_written_as_they_are() {
    let grammar = of(json!({"properties": {"a\"b": {"type": "integer"}, "c\\": {"type": "null"}, "\n": {}}}));
    for text in [r#"{"a\"b":1}"#, r#"{"c\\":null,"a":[]}"#, r#"{"\n":1,"a":"x"}"#] {
        assert!(serde_json::from_str::<Value>(text).is_ok() && takes(&grammar, text), "{text}");
    }
    for text in
        [r#"{"a\":1}"#, r#"{"a\"b":"x"}"#, r#"{"c\\":1}"#, r#"{"\u0061\"b":1}"#, r#"{"x\n":1}"#, r#"{"\n":1,"\n":2}"#]
    {
        assert!(!grammar.is_whole(text.as_bytes()), "{text}");
    }
    // No other way to write a known key.
    let plain = of(json!({"properties": {"a": {"type": "null"}, "a/b": {"type": "null"}}}));
    assert!([r#"{"\u0061":1}"#, r#"{"a\/b":1}"#, r#"{"a":1}"#].iter().all(|text| !plain.is_whole(text.as_bytes())));
    assert!(takes(&plain, r#"{"a/b":null,"a/":1,"":2,"ab":3}"#));
}

#[test]
fn keys_that_are_named_come_once() {
    let twice = of(json!({"required": ["a", "a"]}));
    assert!(takes(&twice, r#"{"a":1}"#) && !twice.is_whole(b"{}") && !twice.is_whole(br#"{"a":1,"a":2}"#));
    let prefixes =
        of(json!({"properties": {"a": {"type": "null"}, "ab": {"const": 1}}, "additionalProperties": false}));
    assert!(takes(&prefixes, r#"{"a":null,"ab":1}"#) && takes(&prefixes, r#"{"ab":1}"#));
    assert!(!begins(&prefixes, br#"{"a":null,"a""#) && !begins(&prefixes, br#"{"a":null,"ab":1,"#));
}

#[test]
fn bytes_of_strings_and_keys_are_utf8() {
    let object = JsonGrammar::object();
    for before in [&b"{\""[..], b"{\"k\":\""] {
        let with = |bytes: &[u8]| begins(&object, &[before, bytes].concat());
        for character in ["\u{80}", "é", "ࠀ", "\u{d7ff}", "\u{e000}", "☃", "😀", "\u{10ffff}"] {
            assert!(with(character.as_bytes()) && !with(&[character.as_bytes(), &[0x80]].concat()), "{character}");
            assert!(!with(&[&character.as_bytes()[..character.len() - 1], b"\""].concat()), "{character}");
        }
        // Too long, a surrogate, too high, and no beginning.
        let wrong: [&[u8]; 7] = [&[0xc0], &[0xc1], &[0xe0, 0x9f], &[0xed, 0xa0], &[0xf0, 0x8f], &[0xf4, 0x90], &[0xf5]];
        assert!(wrong.iter().all(|bytes| !with(bytes)) && !with(&[0x80]) && !with(&[0x1f]));
    }
}

#[test]
fn surrogates_come_in_pairs_and_are_a_character() {
    let one = of(json!({"type": "string", "minLength": 1, "maxLength": 1}));
    for text in [r#""\ud83d\ude00""#, r#""\uD83D\uDE00""#, "\"😀\"", r#""\u00e9""#, r#""\ud7ff""#, r#""\\""#, r#""\"""#]
    {
        assert!(serde_json::from_str::<String>(text).is_ok() && takes(&one, text), "{text}");
    }
    for text in
        [r#""\ud83d""#, r#""\ude00""#, r#""\ud83dx""#, r#""\ud83d\n""#, r#""\ud83d\u0061""#, r#""\u12""#, r#""ab""#]
    {
        assert!(!one.is_whole(text.as_bytes()), "{text}");
    }
}

#[test]
fn numbers_are_finite() {
    let (number, integer) = (of(json!({"type": "number"})), of(json!({"type": "integer"})));
    assert!(takes(&number, "-999999999999999999.5e99") && takes(&number, "1e-07") && takes(&number, "0"));
    assert!(!begins(&number, b"1e999") && !begins(&number, b"1e-100") && !number.is_whole(b"1."));
    assert!(takes(&integer, "-999999999999999999") && !begins(&integer, b"1000000000000000000"));
    assert!(
        !begins(&integer, b"-0")
            && takes(&number, "-0")
            && !integer.is_whole(b"1e2")
            && !integer.is_whole(b"1.0")
            && !begins(&integer, b"01")
    );
}
