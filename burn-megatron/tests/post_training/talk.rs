//! `chat`, driven through a pipe: every answer is what `generate` writes after the whole conversation.

use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use super::eval::model;
use super::{fail, golden, succeed};
use crate::command::{run, text};

/// A message is `w3`, `w5`, `w6` or `w7` for who speaks, its text, and `w4`.
const TEMPLATE: &str = "{% for m in messages %}w3 {{ {'system': 'w5', 'user': 'w6', 'assistant': 'w7'}[m.role] }} {{ m.content }} w4 \
                        {% endfor %}{% if add_generation_prompt %}w3 w7 {% endif %}";

fn talk(folder: &Path, flags: &str, input: &str) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .args("chat --hf . --max-new-tokens 5".split(' ').chain(flags.split_whitespace()))
        .current_dir(folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    program.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    program.wait_with_output().unwrap()
}

/// The answers, a line each.
fn answers(folder: &Path, flags: &str, input: &str) -> Vec<String> {
    let output = talk(folder, flags, input);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(|line| line.trim().to_string()).collect()
}

/// What `generate` writes after messages of a role and a text.
fn expected(folder: &Path, flags: &str, messages: &[(&str, &str)]) -> String {
    let mut words: Vec<String> = Vec::new();
    for (role, text) in messages {
        words.extend(["w3", role].map(String::from));
        words.extend(text.split(' ').map(String::from));
        words.push("w4".into());
    }
    words.extend(["w3", "w7"].map(String::from));
    let tokens: Vec<&str> = words.iter().map(|word| word.trim_start_matches('w')).collect();
    let said = succeed(folder, &format!("generate --hf . --max-new-tokens 5 {flags} --tokens {}", tokens.join(",")));
    said.trim().split(',').map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ")
}

#[test]
fn every_answer_follows_the_whole_conversation() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let adapter = |kind: &str| format!("--adapter {}", golden("lora").join(kind).join("adapter").display());
    let mut first = Vec::new();
    for flags in [String::new(), "--tensor-parallel 2".into(), adapter("lora_all"), adapter("dora")] {
        let input = "w10 w11\nw12\n\n/reset\nw12\n/system w20 w21\nw12\n/bogus\n/quit\nw9\n";
        let found = answers(folder.path(), &flags, input);
        let expected = |messages: &[(&str, &str)]| expected(folder.path(), &flags, messages);
        let one = expected(&[("w6", "w10 w11")]);
        let two = expected(&[("w6", "w10 w11"), ("w7", &one), ("w6", "w12")]);
        let three = expected(&[("w6", "w12")]);
        let four = expected(&[("w5", "w20 w21"), ("w6", "w12")]);
        assert_eq!(found, [one.as_str(), &two, &three, &four], "{flags}");
        assert!(two != three && three != four, "{found:?}");
        first.push(found);
    }
    assert_eq!(first[0], first[1], "tensor parallelism");
    assert_ne!(first[0], first[2], "the adapter");
    // The input may end without a word, and the system message may be a flag.
    let system = answers(folder.path(), "--system w20", "w12");
    assert_eq!(system, [expected(folder.path(), "", &[("w5", "w20"), ("w6", "w12")])]);
    let error = talk(folder.path(), "", "/bogus\n").stderr;
    assert!(String::from_utf8_lossy(&error).contains("/bogus is no command: /reset"));
    assert!(fail(folder.path(), "chat --hf . --max-new-tokens 128").contains("nearest legal: 127"));
    let said = run(folder.path(), "generate --hf . --tokens 1,2 --max-new-tokens 2 --stop-token 9999999");
    says!(text(&said.stderr), "note: --stop-token 9999999 never comes: the model's tokens are 0 to ");
    fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    assert!(fail(folder.path(), "chat --hf .").contains("there is no chat template"));
}

/// Adapters have names, and each answers with its own weights what was said before.
#[test]
fn adapters_are_switched_by_name() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let path = |kind: &str| golden("lora").join(kind).join("adapter").display().to_string();
    let flags = format!("--adapter all={} --adapter {}", path("lora_all"), path("dora"));
    let found =
        answers(folder.path(), &flags, "w10\n/adapter adapter\nw11\n/adapter none\n/reset\nw10\n/adapter bogus\n");
    let expected = |flags: String, messages: &[(&str, &str)]| expected(folder.path(), &flags, messages);
    let one = expected(format!("--adapter {}", path("lora_all")), &[("w6", "w10")]);
    let all = [("w6", "w10"), ("w7", one.as_str()), ("w6", "w11")];
    let two = expected(format!("--adapter {}", path("dora")), &all);
    assert_eq!(found, [one, two, expected(String::new(), &[("w6", "w10")])]);
    let error = talk(folder.path(), &flags, "/adapter bogus\n").stderr;
    assert!(String::from_utf8_lossy(&error).contains("there is no adapter `bogus`; there are none, all, adapter"));
    let twice = format!("chat --hf . --max-new-tokens 5 --adapter {} --adapter {}", path("lora_all"), path("dora"));
    assert!(fail(folder.path(), &twice).contains("there is an adapter `adapter` already; give it another name"));
}

/// The oldest messages make room for new ones, and one that is too long is refused.
#[test]
fn a_long_conversation_forgets_its_beginning() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let long = vec!["w9"; 60].join(" ");
    let output = talk(folder.path(), "", &format!("{long}\n{long}\n{long} {long} {long}\nw12\n"));
    says!(String::from_utf8(output.stderr).unwrap(), "the oldest 2 messages are left out", "there is room for 123");
    let said = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[1].trim(), expected(folder.path(), "", &[("w6", &long)]));
}

/// What cannot be read is no end of the conversation.
#[test]
fn an_input_that_cannot_be_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    fs::write(folder.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .args("chat --hf . --max-new-tokens 5".split(' '))
        .current_dir(folder.path())
        .stdin(fs::File::open(folder.path()).unwrap())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    says!(text(&output.stderr), "error: cannot read standard input: ", "name a file, not a folder");
    for given in ["=adapter", "mine="] {
        says!(fail(folder.path(), &format!("chat --hf . --adapter {given}")), "write --adapter NAME=DIR");
    }
}
