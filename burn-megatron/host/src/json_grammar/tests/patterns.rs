//! Strings of patterns and formats, and numbers between bounds.

use super::random::{Draws, write};
use super::*;

fn check(schema: Value, legal: &[&str], illegal: &[&str]) {
    let grammar = of(schema.clone());
    for text in legal {
        assert!(takes(&grammar, &json!(text).to_string()), "{schema}: {text}");
    }
    for text in illegal {
        assert!(!grammar.is_whole(json!(text).to_string().as_bytes()), "{schema}: {text}");
    }
}

#[test]
fn patterns_are_those_of_ecmascript() {
    for (pattern, legal, illegal) in [
        // Found anywhere, unless it is anchored.
        ("b+", &["b", "abba", "\u{e9}b\n"][..], &["", "a"][..]),
        ("^[a-z]{2,3}$", &["ab", "abc"], &["a", "abcd", "ab\n", "AB"]),
        ("^(?:yes|no)$", &["yes", "no"], &["yesno", ""]),
        // ASCII.
        ("^\\d\\D$", &["7x", "7\u{667}"], &["\u{667}x", "77"]),
        ("^\\w+\\W$", &["a_9-"], &["\u{e9}-", "a"]),
        ("^[\\d.-]+$", &["1.5-2"], &["a", ""]),
        ("^a\\b.b$", &["a b"], &["aab"]),
        // No line breaks, and sets are not sets of sets.
        ("^.$", &["a", "\u{1f600}", "\""], &["\n", "\u{2028}", ""]),
        ("^[[&~]+$", &["[&~"], &["a"]),
        ("^\\u00e9\\/\\x41\\<$", &["\u{e9}/A<"], &["e/A<"]),
        ("^[\"\\\\]$", &["\"", "\\"], &["/"]),
        ("^\\p{Lu}$", &["\u{c9}"], &["\u{e9}"]),
        ("", &["", "x"], &[]),
    ] {
        check(json!({ "pattern": pattern }), legal, illegal);
    }
    // Next to one another, and to lengths in characters.
    check(
        json!({"pattern": "\u{e9}+", "minLength": 3, "maxLength": 4}),
        &["a\u{e9}b", "\u{e9}\u{e9}\u{e9}\u{e9}"],
        &["\u{e9}\u{e9}", "abc", "abcd\u{e9}"],
    );
    check(json!({"pattern": "^.{2}$", "minLength": 2}), &["ab"], &["a", "abc"]);
    check(json!({"pattern": "^2", "format": "time"}), &["23:00:00Z"], &["03:00:00Z", "2"]);
    check(json!({"allOf": [{"pattern": "^a$"}], "description": "x"}), &["a"], &["b"]);
    // Within other values, and with escapes.
    let grammar = of(json!({"type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": ["string", "null"], "pattern": "^\\t*$"}}}));
    assert!(takes(&grammar, r#"{"a": "\t\t"}"#) && takes(&grammar, r#"{"a": null}"#));
    assert!(grammar.after(br#"{"a": "\n"#.iter().copied()).is_empty());
}

#[test]
fn formats_are_what_their_documents_say() {
    for (format, legal, illegal) in [
        (
            "date",
            &["2024-02-29", "2000-02-29", "1999-12-31", "2023-04-30"][..],
            &["2023-02-29", "1900-02-29", "2023-04-31", "2023-13-01", "2023-1-1", "2023-02-30", "2023-00-10"][..],
        ),
        (
            "date-time",
            &["2026-11-30T23:59:59Z", "2026-11-30T00:00:00.125+01:00"],
            &["2026-11-30", "2026-11-30T24:00:00Z", "2026-11-30 10:00:00Z", "2026-11-30T10:00:00"],
        ),
        ("time", &["10:20:30Z", "10:20:30.5-23:59"], &["10:20Z", "10:60:00Z", "10:20:30+1:00"]),
        ("duration", &["P1Y2M3DT4H5M6S", "PT36H", "P4W", "P1DT12H"], &["P", "PT", "1D", "P1S", "PT1D"]),
        ("email", &["a.b+c@example.org", "x@a-b.c"], &["a@b", "a b@c.d", "@c.d", "a.@c.d", "a@-b.c"]),
        ("hostname", &["a", "a-b.example"], &["-a", "a.", "a_b", ""]),
        ("ipv4", &["0.0.0.0", "255.249.99.1"], &["256.0.0.1", "1.2.3", "01.2.3.4"]),
        ("uuid", &["123e4567-E89b-12d3-a456-426614174000"], &["123e4567e89b12d3a456426614174000", "x"]),
    ] {
        check(json!({"type": "string", "format": format}), legal, illegal);
    }
}

/// In hundredths, every number of two digits behind the point in all its spellings.
#[test]
fn numbers_are_between_their_bounds() {
    let spelled = |value: i64| {
        let (sign, size) = (if value < 0 { "-" } else { "" }, value.abs());
        let mut all =
            vec![format!("{sign}{}.{:02}", size / 100, size % 100), format!("{sign}{}.{:02}0", size / 100, size % 100)];
        all.extend((size % 10 == 0).then(|| format!("{sign}{}.{}", size / 100, size / 10 % 10)));
        let whole = (size % 100 == 0).then(|| format!("{sign}{}", size / 100));
        (all, whole)
    };
    let bounds = [-12.5, -11.0, -1.0, -0.5, -0.05, 0.0, 0.05, 0.1, 0.75, 1.0, 1.5, 9.0, 10.0, 10.99, 11.5];
    let pairs = bounds.iter().flat_map(|least| bounds.iter().map(move |most| (Some(*least), Some(*most))));
    let alone = bounds.iter().flat_map(|bound| [(Some(*bound), None), (None, Some(*bound))]);
    for (at, (least, most)) in pairs.chain(alone).enumerate() {
        let keys = [["minimum", "exclusiveMinimum"][at % 2], ["maximum", "exclusiveMaximum"][at / 2 % 2]];
        let hundredths = |bound: f64| (bound * 100.0).round() as i64;
        let is_legal = |value: i64| {
            least.is_none_or(|least| value > hundredths(least) || value == hundredths(least) && keys[0] == "minimum")
                && most.is_none_or(|most| value < hundredths(most) || value == hundredths(most) && keys[1] == "maximum")
        };
        for kind in ["number", "integer"] {
            let mut schema = json!({ "type": kind });
            for (key, bound) in keys.iter().zip([least, most]) {
                bound.into_iter().for_each(|bound| schema[key] = json!(bound));
            }
            let grammar = JsonGrammar::of_schema(&schema).ok();
            for value in -1310..=1310 {
                let (all, whole) = spelled(value);
                let (fractions, wholes) = if kind == "number" { (all, whole) } else { (Vec::new(), whole) };
                for text in fractions.iter().chain(&wholes) {
                    let found = grammar.as_ref().is_some_and(|grammar| grammar.is_whole(text.as_bytes()));
                    assert_eq!(found, is_legal(value) && text != "-0", "{schema}: {text}");
                }
            }
        }
    }
    let grammar = of(json!({"type": "array", "items": {"type": "integer", "minimum": 0}}));
    assert!(takes(&grammar, "[0, 999999999999999999]"));
    assert!(
        ["[-1]", "[01]", "[1.0]", "[1e1]", "[1000000000000000000]"]
            .iter()
            .all(|text| !grammar.is_whole(text.as_bytes()))
    );
    let grammar = of(json!({"exclusiveMinimum": 0, "maximum": 1}));
    assert!(
        takes(&grammar, "0.000000000000000001") && takes(&grammar, "1.0") && takes(&grammar, "0.999999999999999999")
    );
    assert!(
        ["0", "0.0", "-1", "1.000000000000000001", "0.0000000000000000000"]
            .iter()
            .all(|text| !grammar.is_whole(text.as_bytes()))
    );
}

#[test]
fn numbers_are_multiples() {
    for (multiple, kind, legal, illegal) in [
        (json!(7), "integer", &["0", "-7", "14", "700000000000000007"][..], &["1", "-8", "7.0", "-0"][..]),
        (json!(7), "number", &["0", "-7", "14.0", "7.000"], &["7.7", "1", ".7", "-0.0"]),
        (json!(0.01), "number", &["3.14", "-2.5", "1.500", "7"], &["0.001", "2.718"]),
        (json!(0.25), "number", &["0.25", "-1.5", "3.750", "2"], &["0.2", "0.255", "1.3"]),
        (json!(2.5), "integer", &["0", "5", "-10"], &["2", "7"]),
    ] {
        let grammar = of(json!({"type": kind, "multipleOf": multiple}));
        assert!(legal.iter().all(|text| takes(&grammar, text)), "{multiple} {kind}");
        assert!(illegal.iter().all(|text| !grammar.is_whole(text.as_bytes())), "{multiple} {kind}");
    }
    let grammar = of(json!({"type": "integer", "multipleOf": 5, "minimum": 3, "maximum": 12}));
    let found: Vec<i32> = (-20..40).filter(|number| grammar.is_whole(number.to_string().as_bytes())).collect();
    assert_eq!(found, [5, 10]);
}

/// What is begun can be ended.
#[test]
fn texts_of_patterns_and_bounds_end() {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["a", "b", "n"], "properties": {
        "a": {"type": "string", "pattern": "^(\"[^\\x00-\\x1f]\"|\\\\|\u{e9}\u{e8}){1,3}$"},
        "b": {"type": "string", "format": "date-time"},
        "n": {"type": "number", "minimum": -0.25, "exclusiveMaximum": 12.125}}});
    let (grammar, mut draws, mut whole) = (of(schema), Draws(7), 0);
    for _ in 0..400 {
        let Some(text) = write(&grammar, &mut draws, 60) else { continue };
        let value: Value = serde_json::from_slice(&text).unwrap();
        let number = value["n"].as_f64().unwrap();
        assert!((-0.25..12.125).contains(&number) && value["b"].as_str().unwrap().len() >= 20, "{value}");
        whole += 1;
    }
    assert!(whole > 20, "{whole} texts");
}
