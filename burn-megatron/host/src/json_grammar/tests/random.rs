//! Random texts of many schemas: parsers read all of them, and they are what the schema says.

use super::*;

/// SplitMix64 (Steele, Lea and Flood, 2014).
pub(super) struct Draws(pub u64);

impl Draws {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % end as u64) as usize
    }
}

/// Keys of the schemas, with the quote behind them.
const HINTS: [&str; 4] = [r#"a\"b""#, "n\"", "a\"", "b\""];

/// A text of bytes that the grammar lets follow; after `length` of them rather those that close it. None if it is too long.
pub(super) fn write(grammar: &JsonGrammar, draws: &mut Draws, length: usize) -> Option<Vec<u8>> {
    let (mut stacks, mut text) = (vec![grammar.start()], Vec::new());
    while text.len() < 4 * length {
        let next = |byte: u8| Some((byte, grammar.step(&stacks, byte))).filter(|(_, next)| !next.is_empty());
        let mut all: Vec<(u8, Vec<Stack>)> = (0..=255).filter_map(next).collect();
        let may_end = grammar.may_end_in(&stacks);
        if may_end && (all.is_empty() || text.len() >= length || draws.below(4) == 0) {
            return Some(text);
        }
        assert!(!all.is_empty(), "nothing may follow {}", String::from_utf8_lossy(&text));
        // Of letters there are many: what ends strings, and what JSON is made of, comes more often.
        let closing: &[u8] = if text.len() < length { b"\"\\:,{[]}du8" } else { b"\"]}:" };
        let special: Vec<usize> = (0..all.len()).filter(|at| closing.contains(&all[*at].0)).collect();
        let is_special = !special.is_empty() && (text.len() >= length || draws.below(3) == 0);
        let at = if is_special { special[draws.below(special.len())] } else { draws.below(all.len()) };
        // Keys that must be there are rarely met by chance.
        let is_begun = |hint: &&str, len: usize| text.ends_with([b"\"", &hint.as_bytes()[..len]].concat().as_slice());
        let hinted =
            |hint: &&str| (0..hint.len()).rev().find(|len| is_begun(hint, *len)).map(|len| hint.as_bytes()[len]);
        let hint = HINTS.get(draws.below(2 * HINTS.len())).and_then(hinted);
        let at = hint.and_then(|byte| all.iter().position(|(other, _)| *other == byte)).unwrap_or(at);
        let (byte, then) = all.swap_remove(at);
        text.push(byte);
        stacks = then;
    }
    None
}

/// Whether a value is what a schema says, of the keywords that a grammar knows.
fn is_valid(root: &Value, schema: &Value, value: &Value) -> bool {
    let Some(keys) = schema.as_object() else { return true };
    let valid = |schema: &Value, value: &Value| is_valid(root, schema, value);
    let number = |key: &str| keys.get(key).and_then(Value::as_u64).map(|number| number as usize);
    let within = |count: usize, least: &str, most: &str| {
        number(least).is_none_or(|least| count >= least) && number(most).is_none_or(|most| count <= most)
    };
    let is_of = |kind: &Value| match kind.as_str().unwrap() {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "integer" => value.is_i64(),
        _ => value.is_number(),
    };
    let kind =
        keys.get("type").is_none_or(|kind| kind.as_array().map_or_else(|| is_of(kind), |all| all.iter().any(is_of)));
    let any = |key: &str| keys.get(key).is_none_or(|all| all.as_array().unwrap().iter().any(|of| valid(of, value)));
    let inner = match value {
        Value::String(text) => within(text.chars().count(), "minLength", "maxLength"),
        Value::Array(items) => {
            within(items.len(), "minItems", "maxItems") && items.iter().all(|item| valid(&schema["items"], item))
        }
        Value::Object(members) => {
            let of = |key: &String| schema["properties"].get(key).unwrap_or(&schema["additionalProperties"]);
            let known = |(key, value): (&String, &Value)| *of(key) != json!(false) && valid(of(key), value);
            let required = schema["required"].as_array().into_iter().flatten();
            members.iter().all(known) && required.into_iter().all(|key| members.contains_key(key.as_str().unwrap()))
        }
        _ => true,
    };
    kind && inner
        && any("anyOf")
        && any("oneOf")
        && keys.get("enum").is_none_or(|all| all.as_array().unwrap().contains(value))
        && keys.get("const").is_none_or(|only| only == value)
        && keys.get("$ref").is_none_or(|name| valid(root.pointer(&name.as_str().unwrap()[1..]).unwrap(), value))
}

#[test]
fn random_texts_are_valid() {
    let tree = json!({"type": "object", "required": ["k"], "additionalProperties": false, "properties": {
        "k": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}, "maxItems": 2}, {"type": "null"}]}}});
    let schemas = [
        json!({}),
        json!({"type": "object"}),
        json!({"type": "string", "minLength": 2, "maxLength": 5}),
        json!({"type": "array", "items": {"type": ["integer", "number", "string"]}, "minItems": 1, "maxItems": 4}),
        json!({"properties": {"a\"b": {"type": "integer"}, "a": {"type": "null"}, "\u{1}é": {}}, "required": ["a\"b"]}),
        json!({"properties": {"a\\": {"type": "boolean"}, "ab": {"const": {"x": [1, "y"]}}, "abc": {"enum": ["", "é\n", 12, 1]}},
            "required": ["ab", "ab"], "additionalProperties": false}),
        json!({"type": "object", "additionalProperties": {"type": "integer"}, "required": ["n"]}),
        json!({"anyOf": [{"properties": {"a": {"type": "string"}}, "required": ["a"]},
            {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["b"]}, {"type": "boolean"}]}),
        json!({"oneOf": [{"type": "string", "enum": ["a", 1, "ab"]}, {"type": "array", "items": {"type": "array"}}]}),
        json!({"$ref": "#/$defs/t", "$defs": {"t": tree}}),
    ];
    let mut draws = Draws(7);
    for schema in schemas {
        let (grammar, mut whole) = (of(schema.clone()), 0);
        for _ in 0..60 {
            let Some(text) = write(&grammar, &mut draws, 60) else { continue };
            let shown = String::from_utf8_lossy(&text).into_owned();
            let value: Value = serde_json::from_slice(&text).unwrap_or_else(|error| panic!("{error}: {shown}"));
            assert!(is_valid(&schema, &schema, &value), "{schema}: {shown}");
            assert!(grammar.is_whole(&text), "{shown}");
            whole += 1;
        }
        assert!(whole > 20, "{schema}: {whole} texts");
    }
}
