//! What a grammar cannot say is refused, with its place in the schema.

use super::*;

#[test]
fn what_a_grammar_cannot_say_is_refused_by_place_and_name() {
    let items = |schema: Value| json!({"properties": {"a": {"type": "array", "items": schema}}});
    for (schema, said) in [
        (json!({"type": "integer", "not": {}}), "the keyword `not` is not supported; legal: properties,"),
        (json!({"type": "integer", "multipleOf": 0}), "multipleOf: 0 is not above 0"),
        (json!({"type": "integer", "multipleOf": -2}), "multipleOf: -2 is not above 0"),
        (json!({"type": "integer", "multipleOf": "2"}), "multipleOf: \"2\" is no number"),
        (
            json!({"type": "integer", "multipleOf": 123456}),
            "multipleOf: 123456 has too many digits; nearest legal: 10000",
        ),
        (json!({"multipleOf": 7, "minimum": 1, "maximum": 6}), "no text is one"),
        (json!({"type": "string", "pattern": 3}), "pattern: 3: a string is needed"),
        (json!({"type": "string", "pattern": "(a"}), "pattern: \"(a\": unclosed group"),
        (
            json!({"type": "string", "pattern": "a(?=b)"}),
            "look-around, including look-ahead and look-behind, is not supported",
        ),
        (json!({"type": "string", "pattern": "a\\"}), "nothing follows the last backslash"),
        (json!({"type": "string", "pattern": "[^]a]"}), "brackets with nothing in them are not supported"),
        (json!({"type": "string", "pattern": "(a)\\1"}), "`\\1` is not supported"),
        (json!({"type": "string", "pattern": "a$b"}), "pattern: \"a$b\": no text is one"),
        (json!({"type": "string", "pattern": "[^\\x01-\u{10ffff}]"}), "no text is one"),
        (json!({"type": "string", "pattern": "^(.{0,99}){0,99}$"}), "its automaton has more than 4 MiB"),
        (json!({"type": "string", "format": "color"}), "format: \"color\": is not supported; legal: date-time, date,"),
        (json!({"type": "string", "pattern": "^a{4}", "maxLength": 3}), "pattern: \"^a{4}\": no text is one"),
        (json!({"type": "string", "pattern": "a", "format": "date"}), "pattern: \"a\": no text is one"),
        (
            json!({"type": "string", "pattern": "^(ab*){400}$", "maxLength": 2000}),
            "their automaton has more than 2097152 ways",
        ),
        (json!({"allOf": [{"type": "string"}, {"minLength": 1}]}), "allOf of several schemas is not supported"),
        (json!({"type": "integer", "minimum": "1"}), "minimum: \"1\" is no number"),
        (json!({"type": "integer", "minimum": 3, "maximum": 2}), "no number is between its bounds"),
        (json!({"type": "integer", "exclusiveMinimum": 1, "maximum": 1.5}), "no number is between its bounds"),
        (json!({"minimum": 1, "exclusiveMinimum": 1}), "`exclusiveMinimum` next to `minimum` is not supported"),
        (json!({"minimum": 1e300}), "minimum: 1e+300 has more than 18 digits"),
        (json!({"type": "string", "minimum": 1}), "`minimum` says nothing of type string"),
        (json!({"type": "text"}), "type: \"text\" is not known; legal: object,"),
        (json!({"type": []}), "type: the list is empty"),
        (json!({"type": ["null", 3]}), "type: 3 is not known"),
        (json!({"$ref": "#/$defs/x"}), "is not found in the schema"),
        (json!({"$ref": 3}), "$ref: 3 is not found"),
        (json!(3), "3 is no schema"),
        (json!(false), "the schema `false` is not supported"),
        (json!({"type": "string", "minLength": 3, "maxLength": 2}), "at least 3 and at most 2"),
        (json!({"type": "object", "required": ["a"], "additionalProperties": false}), "a is no property"),
        (json!({"properties": [], "type": "object"}), "properties: an object is needed"),
        (json!({"enum": []}), "enum: a list of values"),
        (json!({"anyOf": {}}), "anyOf: a list of schemas"),
        (json!({"type": "string", "maxLength": -1}), "maxLength: -1 is no whole number"),
        // Keywords next to one another that are not merged.
        (json!({"anyOf": [{"type": "object"}], "properties": {}}), "`properties` next to `anyOf` is not supported"),
        (json!({"anyOf": [{}], "oneOf": [{}]}), "`oneOf` next to `anyOf` is not supported"),
        (json!({"anyOf": [{}], "type": "string"}), "`type` next to `anyOf` is not supported"),
        (json!({"$ref": "#", "minLength": 1}), "`minLength` next to `$ref` is not supported"),
        (json!({"const": 1, "enum": [1]}), "`enum` next to `const` is not supported"),
        (json!({"type": "string", "properties": {}}), "`properties` says nothing of type string"),
        (json!({"minLength": 1, "items": {}}), "says nothing of type"),
        (json!({"type": "string", "enum": [1, null]}), "none of the values is of the type"),
        (json!({"type": "integer", "const": 1.5}), "none of the values is of the type"),
    ] {
        let alone = refused(schema.clone());
        assert!(alone.starts_with("#: ") && alone.contains(said), "{schema}: {alone}");
        let within = refused(items(schema));
        assert!(within.starts_with("#/properties/a/items: "), "{within}");
    }
    let of_definition = refused(json!({"$ref": "#/$defs/x", "$defs": {"x": {"anyOf": [{}, {"type": "y"}]}}}));
    assert!(of_definition.starts_with("#/$defs/x/anyOf/1: type: \"y\""), "{of_definition}");
    let itself = refused(json!({"$ref": "#/$defs/x", "$defs": {"x": {"$ref": "#/$defs/x"}}}));
    assert_eq!(itself, "#/$defs/x: it is nothing but itself");
    let endless = json!({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]});
    assert!(refused(endless).contains("every text of it has more than 100 arrays and objects"));
}

/// What says nothing more is legal.
#[test]
fn a_type_next_to_values_chooses_among_them() {
    let grammar = of(json!({"type": ["string", "integer"], "enum": ["a", 1, 1.5, null]}));
    assert!(takes(&grammar, "\"a\"") && takes(&grammar, "1"));
    assert!(["1.5", "null"].iter().all(|text| !grammar.is_whole(text.as_bytes())));
    assert!(takes(&of(json!({"const": "a", "type": "string", "title": "A"})), "\"a\""));
    assert!(takes(&of(json!({"$ref": "#/$defs/x", "description": "x", "$defs": {"x": {"type": "null"}}})), "null"));
    // At once itself and something else is something else.
    let cycle = json!({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]},
        "b": {"anyOf": [{"$ref": "#/$defs/a"}, {"const": 1}]}}});
    assert!(takes(&of(cycle.clone()), "null") && takes(&of(cycle), "1"));
}
