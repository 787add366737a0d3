//! Conversations: ids and masks as transformers has them, and the command.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use burn_megatron::data::chat::{ChatSample, ChatTokenizer, parse_row};
use serde_json::{Value, json};

use super::{fail, succeed};

pub(super) fn golden() -> PathBuf {
    super::golden("chat")
}

fn oracle() -> Vec<Value> {
    let rows = fs::read_to_string(golden().join("rendered.jsonl")).unwrap();
    rows.lines().map(|row| serde_json::from_str(row).unwrap()).collect()
}

/// The golden template of this name, changed.
pub(super) fn template(folder: &Path, name: &str, change: impl Fn(&str) -> String) -> PathBuf {
    let all: Value = serde_json::from_str(&fs::read_to_string(golden().join("templates.json")).unwrap()).unwrap();
    let path = folder.join(format!("{name}.jinja"));
    fs::write(&path, change(all[name].as_str().unwrap())).unwrap();
    path
}

fn without_blocks(template: &str) -> String {
    template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
}

/// What we make of an oracle's row.
fn encode(row: &Value, change: impl Fn(&str) -> String) -> ChatSample {
    let folder = tempfile::tempdir().unwrap();
    let template = template(folder.path(), row["template"].as_str().unwrap(), change);
    let tokenizer = ChatTokenizer::open(&golden().join("tokenizer"), Some(&template)).unwrap();
    tokenizer.encode(&parse_row(row.to_string().as_bytes()).unwrap()).unwrap_or_else(|error| panic!("{row}: {error}"))
}

fn masks(row: &Value) -> Vec<bool> {
    row["assistant_masks"].as_array().unwrap().iter().map(|counts| *counts == 1).collect()
}

#[test]
fn texts_ids_and_masks_are_those_of_transformers() {
    let rows = oracle();
    assert_eq!(rows.len(), 24);
    // Keys keep their order only in the row's own text.
    let texts = fs::read_to_string(golden().join("rendered.jsonl")).unwrap();
    for (row, text) in rows.iter().zip(texts.lines()) {
        let folder = tempfile::tempdir().unwrap();
        let template = template(folder.path(), row["template"].as_str().unwrap(), str::to_string);
        let tokenizer = ChatTokenizer::open(&golden().join("tokenizer"), Some(&template)).unwrap();
        let sample = tokenizer.encode(&parse_row(text.as_bytes()).unwrap()).unwrap();
        assert_eq!(sample.text, row["text"].as_str().unwrap());
        assert_eq!(json!(sample.ids), row["input_ids"], "{}", sample.text);
        assert_eq!(sample.mask, masks(row), "{}", sample.text);
    }
}

#[test]
fn without_generation_blocks_turns_are_what_each_message_adds() {
    let (mut equal, mut more) = (0, 0);
    for row in oracle().iter().filter(|row| row["template"] != "tools") {
        let (sample, marked) = (encode(row, without_blocks), masks(row));
        assert_eq!(json!(sample.ids), row["input_ids"]);
        // Between turns, chatml and gemma write a newline after the block, which the difference has too.
        let newline = sample.ids.last().copied();
        for (token, (counts, marks)) in sample.mask.iter().zip(&marked).enumerate() {
            assert!(counts == marks || *counts && Some(sample.ids[token]) == newline, "{} at {token}", sample.text);
        }
        if row["template"] == "llama3" {
            assert_eq!(sample.mask, marked);
            equal += 1;
        }
        more += usize::from(sample.mask != marked);
    }
    assert!(equal == 6 && more > 0, "{equal} {more}");
}

/// Offsets that begin after a token's space, or end before it, leave gaps in front of a turn, after it and between turns.
#[test]
fn a_tokenizer_that_trims_offsets_ends_no_mask_early() {
    let folder = tempfile::tempdir().unwrap();
    let template = folder.path().join("bare.jinja");
    let text = "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    fs::write(&template, text).unwrap();
    let mut tokenizer: Value =
        serde_json::from_str(&fs::read_to_string(golden().join("tokenizer/tokenizer.json")).unwrap()).unwrap();
    tokenizer["post_processor"] =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let turns = ["Say it", "  Hello there ", " and more?", " good", " Now", "you "];
    let role = |at: usize| if at.is_multiple_of(2) { "user" } else { "assistant" };
    let messages: Vec<Value> =
        turns.iter().enumerate().map(|(at, text)| json!({"role": role(at), "content": text})).collect();
    let row = parse_row(json!({"messages": messages}).to_string().as_bytes()).unwrap();
    let encode = |folder: &Path| ChatTokenizer::open(folder, Some(&template)).unwrap().encode(&row).unwrap();
    let (whole, trimmed) = (encode(&golden().join("tokenizer")), encode(folder.path()));
    assert_eq!(whole.turns.len(), 3);
    assert_eq!(trimmed, whole);
}

pub(super) fn row(question: &str, answer: &str) -> String {
    json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}).to_string()
}

#[test]
fn the_command_writes_samples_of_plain_and_compressed_files() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let chatml = template(folder.path(), "chatml", str::to_string);
    let lines = [row("Hi\n\nthere", "<think>\nhm\n</think>\n\nHello!"), row("2+2", "4")].join("\n");
    fs::write(at("a.jsonl"), &lines).unwrap();
    let mut gz =
        flate2::write::GzEncoder::new(fs::File::create(at("a.jsonl.gz")).unwrap(), flate2::Compression::fast());
    gz.write_all(lines.as_bytes()).unwrap();
    gz.finish().unwrap();
    let frame =
        |text: &str| ruzstd::encoding::compress_to_vec(text.as_bytes(), ruzstd::encoding::CompressionLevel::Fastest);
    let (first, second) = lines.split_once('\n').unwrap();
    // Two frames, and one between them that is to be skipped.
    let skipped = [&[0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
    fs::write(at("a.jsonl.zst"), [frame(&format!("{first}\n")), skipped, frame(second)].concat()).unwrap();
    let array: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    fs::write(at("a.json"), serde_json::to_string_pretty(&array).unwrap()).unwrap();

    let tokenizer = golden().join("tokenizer");
    let mut outputs = Vec::new();
    for input in ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json"] {
        let command = format!(
            "preprocess --chat --input {input} --tokenizer {} --chat-template {} --output out.jsonl",
            tokenizer.display(),
            chatml.display()
        );
        says!(succeed(folder.path(), &command), "out.jsonl: 2 samples");
        outputs.push(fs::read_to_string(at("out.jsonl")).unwrap());
    }
    assert!(outputs.windows(2).all(|pair| pair[0] == pair[1]));
    let sample: Value = serde_json::from_str(outputs[0].lines().next().unwrap()).unwrap();
    let same = |row: &&Value| row["template"] == "chatml" && row["text"] == sample["text"];
    let oracle = oracle();
    let expected = oracle.iter().find(same).expect("a row of the oracle");
    assert_eq!(
        (&sample["input_ids"], &sample["assistant_masks"]),
        (&expected["input_ids"], &expected["assistant_masks"])
    );
}

#[test]
fn bad_rows_templates_and_tokenizers_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let (gemma, llama3) =
        (template(folder.path(), "gemma", str::to_string), template(folder.path(), "llama3", str::to_string));
    let tokenizer = golden().join("tokenizer");
    let command = |input: &str, tokenizer: &Path, template: &Path, more: &str| {
        let [tokenizer, template] = [tokenizer, template].map(Path::display);
        format!(
            "preprocess --chat --input {input} --tokenizer {tokenizer} --chat-template {template} --output out.jsonl {more}"
        )
    };
    let twice = json!({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]});
    let bad = [
        ("{\"messages\": [", "not JSON"),
        (&twice.to_string(), "the chat template fails: "),
        (r#"{"messages":[{"role":"user","content":"a"}]}"#, "none has the role `assistant`"),
        (
            r#"{"messages":[{"role":"usr","content":"a"},{"role":"assistant","content":"b"}]}"#,
            "messages[0].role: unknown role `usr`",
        ),
        (r#"{"prompt":"a","completion":""}"#, "completion: empty"),
    ];
    for (text, words) in bad {
        fs::write(at("bad.jsonl"), [&row("a", "b"), text].join("\n")).unwrap();
        let said = fail(folder.path(), &command("bad.jsonl", &tokenizer, &gemma, ""));
        says!(said, "bad.jsonl:2: ", words, "--skip-bad-rows");
        assert!(!at("out.jsonl").exists(), "nothing half-written");
    }
    let all: Vec<&str> = bad.iter().map(|(text, _)| *text).collect();
    fs::write(at("bad.jsonl"), [&all[..], &[&row("a", "b")]].concat().join("\n")).unwrap();
    let said = succeed(folder.path(), &command("bad.jsonl", &tokenizer, &gemma, "--skip-bad-rows"));
    says!(said, "1 samples", "left out 5 rows", "bad.jsonl:1: not JSON");

    fs::write(at("good.jsonl"), row("a", "b")).unwrap();
    // A template that writes tokens that the tokenizer does not have, one that drops a role, and wrong syntax.
    let write = |name: &str, text: &str| {
        fs::write(at(name), text).unwrap();
        at(name)
    };
    let foreign = write("foreign.jinja", "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}");
    assert!(
        fail(folder.path(), &command("good.jsonl", &tokenizer, &foreign, ""))
            .contains("writes <|user|>, which is no token")
    );
    let deaf = write(
        "deaf.jinja",
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    );
    fs::write(at("long.jsonl"), row("a question", "an answer")).unwrap();
    let said = fail(folder.path(), &command("long.jsonl", &tokenizer, &deaf, ""));
    says!(said, "messages[0]: the chat template drops this message with the role `user`");
    let broken = write("broken.jinja", "{% for m in messages %}");
    assert!(
        fail(folder.path(), &command("good.jsonl", &tokenizer, &broken, "")).contains("broken.jinja: syntax error")
    );
    // A tokenizer without the special tokens that the template takes, and one without a template.
    fs::create_dir(at("bare")).unwrap();
    fs::copy(tokenizer.join("tokenizer.json"), at("bare/tokenizer.json")).unwrap();
    let said = fail(folder.path(), &command("good.jsonl", &at("bare"), &llama3, ""));
    says!(said, "it writes bos_token, which tokenizer_config.json does not have");
    fs::write(at("bare/tokenizer_config.json"), r#"{"bos_token": "<bos>"}"#).unwrap();
    let said = fail(folder.path(), &command("good.jsonl", &at("bare"), &llama3, ""));
    says!(said, "it writes bos_token = <bos>, which is no token of tokenizer.json");
    let said = fail(
        folder.path(),
        &format!("preprocess --chat --input good.jsonl --tokenizer {} --output o.jsonl", at("bare").display()),
    );
    says!(said, "there is no chat template");
    fs::write(at("empty.jsonl"), "\n").unwrap();
    says!(
        fail(folder.path(), &command("empty.jsonl", &tokenizer, &llama3, "")),
        "there is no conversation in empty.jsonl"
    );
    // An output that is the input would end it.
    let before = fs::read(at("good.jsonl")).unwrap();
    let command = command("good.jsonl", &tokenizer, &llama3, "").replace("out.jsonl", "./good.jsonl");
    says!(fail(folder.path(), &command), "--output ./good.jsonl is an input");
    assert_eq!(fs::read(at("good.jsonl")).unwrap(), before);
}
