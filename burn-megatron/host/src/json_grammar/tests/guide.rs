//! A text token by token, with what is known of the tokens before.

use super::*;

fn tokens() -> Arc<TokenTexts> {
    let bytes = (0..=255).map(|byte| vec![byte]);
    let words =
        ["{\"", "\": ", "\", \"", "\"}", "ab", "abc", " a", "é☃", "\\n", "\"a", "12", "[]", "true", "  ", "\n  "];
    let words = words.iter().map(|word| word.as_bytes().to_vec());
    Arc::new(TokenTexts::new(bytes.chain(words).chain([b"\xe2\x98".to_vec(), b"\x83a".to_vec(), Vec::new()])))
}

/// What the guide says is what each token's bytes say, also where it knows it from before, and after a text of others.
#[test]
fn the_tokens_that_may_follow_are_those_that_each_may() {
    let tokens = tokens();
    let schema = json!({"properties": {"ab": {"type": "string", "minLength": 2, "maxLength": 4}, "abc": {"type": ["array", "null"]}},
        "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "string"}, {"enum": [true, 12, "ab"]}]}});
    let grammar = of(schema);
    let guide = Guide::new(grammar.clone(), Arc::clone(&tokens));
    for text in
        [r#"{"ab": "ab☃\n", "abc": [], "abcd": "12 ab\"", "é": 12, "x": true}"#, r#"{"abc": null, "ab": "ab"}"#, "{ \n"]
    {
        let mut written = Vec::new();
        for byte in text.bytes() {
            let (next, may_end) = guide.next(&written);
            let before = || written.iter().flat_map(|token| tokens.text(*token)).copied();
            let is_legal = |token: i64| {
                let new = tokens.text(token);
                !new.is_empty() && !grammar.after(before().chain(new.iter().copied())).is_empty()
            };
            let all = 0..256 + 18;
            for token in all {
                assert_eq!(next.contains(token as usize), is_legal(token), "{token} after {written:?} of {text}");
            }
            assert_eq!(may_end, grammar.is_whole(&before().collect::<Vec<u8>>()));
            written.push(i64::from(byte));
        }
    }
    assert_eq!(guide.another().next(&[]).0, guide.next(&[]).0);
}
