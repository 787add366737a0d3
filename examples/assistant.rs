//! From random weights to an assistant, with the command line alone: a tiny Llama learns sums from conversations (SFT), an
//! adapter makes it curt (LoRA), preferences make it wordy (DPO), a smaller model learns from that (distillation), each is
//! evaluated, and in the end you can talk to it. Half a minute on two cores.
//!
//! ```text
//! cargo run --release --example assistant
//! ```

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Result, bail, ensure};
use burn_megatron::cli::{self, Cli};
use clap::Parser;
use examples::report;
use serde_json::{Map, Value, json};

/// Everything is in it: `@` in the commands.
const FOLDER: &str = "runs/assistant";

/// What one types after `burn-megatron`. Models this small train on a CPU as fast as on a GPU.
const COMMANDS: &str = "\
    preprocess --chat --input @/chats.jsonl --tokenizer @/base --output @/samples.jsonl
    train @/chat.toml --device cpu
    export --checkpoint @/chat/checkpoints --hf @/assistant --like @/base
    eval --hf @/assistant --task @/sum.jsonl @/either.jsonl --apply-chat-template
    train @/lora.toml --device cpu
    export --checkpoint @/lora/checkpoints --adapter @/adapter
    eval --hf @/assistant --adapter @/adapter --task @/sum.jsonl @/either.jsonl --apply-chat-template
    train @/preference.toml --device cpu
    export --checkpoint @/preference/checkpoints --hf @/preferred --like @/base
    eval --hf @/preferred --task @/sum.jsonl @/either.jsonl --apply-chat-template
    train @/distill.toml --device cpu
    export --checkpoint @/distill/checkpoints --hf @/small --like @/base
    eval --hf @/small --task @/sum.jsonl @/either.jsonl --apply-chat-template
    chat --hf @/assistant --adapter curt=@/adapter";

fn main() -> ExitCode {
    report(run())
}

fn run() -> Result<()> {
    if std::env::args().len() > 1 {
        println!("It takes no flags; its files are examples/assistant/*.toml");
        return Ok(());
    }
    let folder = Path::new(FOLDER);
    if folder.exists() {
        bail!("{FOLDER} exists already: remove it, or go on there with burn-megatron");
    }
    fs::create_dir_all(folder.join("base"))?;
    for (name, text) in files() {
        fs::write(folder.join(name), text)?;
    }
    COMMANDS.lines().try_for_each(|line| command(&line.trim().replace('@', FOLDER)))
}

fn command(line: &str) -> Result<()> {
    println!("\n$ burn-megatron {line}");
    if line.starts_with("chat") {
        println!("Ask for a sum, such as 2+3. /adapter none leaves the adapter away, /quit ends.");
    }
    let code = cli::run(Cli::try_parse_from(["burn-megatron"].into_iter().chain(line.split(' ')))?)?;
    ensure!(code == ExitCode::SUCCESS, "it did not end well");
    Ok(())
}

type Answer = fn((usize, usize)) -> String;

fn question((a, b): (usize, usize)) -> String {
    format!("{a}+{b}")
}

fn sum((a, b): (usize, usize)) -> String {
    (a + b).to_string()
}

fn equation(terms: (usize, usize)) -> String {
    format!("{}={}", question(terms), sum(terms))
}

/// Runs, data and a tokenizer with a chat template.
fn files() -> Vec<(&'static str, String)> {
    let all: Vec<(usize, usize)> = (0..100).map(|at| (at / 10, at % 10)).collect();
    let lines = |rows: &mut dyn Iterator<Item = Value>| rows.map(|row| row.to_string() + "\n").collect::<String>();
    // Three sums, so that every sum comes first, second and third.
    let chat = |at: usize, answer: Answer| {
        let turns = [at, 3 * at + 14, 7 * at + 49].map(|at| all[at % 100]);
        let said = turns.map(|terms| {
            [
                json!({ "role": "user", "content": question(terms) }),
                json!({ "role": "assistant", "content": answer(terms) }),
            ]
        });
        json!({ "messages": said.concat() })
    };
    let both: [Answer; 2] = [sum, equation];
    let task = |answers: &[Answer]| {
        let targets = |terms| answers.iter().map(|answer| answer(terms)).collect::<Vec<_>>();
        lines(
            &mut all
                .iter()
                .map(|terms| json!({ "context": question(*terms), "target": targets(*terms), "max_new_tokens": 8 })),
        )
    };
    let pair = |terms| json!({ "prompt": question(terms), "chosen": equation(terms), "rejected": sum(terms) });
    vec![
        ("chat.toml", include_str!("assistant/chat.toml").into()),
        ("lora.toml", include_str!("assistant/lora.toml").into()),
        ("preference.toml", include_str!("assistant/preference.toml").into()),
        ("distill.toml", include_str!("assistant/distill.toml").into()),
        ("chats.jsonl", lines(&mut (0..100).flat_map(|at| both.map(|answer| chat(at, answer))))),
        ("short.jsonl", lines(&mut (0..100).map(|at| chat(at, sum)))),
        ("pairs.jsonl", lines(&mut all.iter().map(|terms| pair(*terms)))),
        ("sum.jsonl", task(&[sum])),
        ("either.jsonl", task(&both)),
        ("base/tokenizer.json", tokenizer().to_string()),
        ("base/tokenizer_config.json", json!({ "eos_token": "<end>", "chat_template": TEMPLATE }).to_string()),
    ]
}

/// `{% generation %}` tells what the assistant has said.
const TEMPLATE: &str = "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% generation %}{{ m.content }}<end>\
                        {% endgeneration %}{% else %}<user>{{ m.content }}<end>{% endif %}{% endfor %}\
                        {% if add_generation_prompt %}<assistant>{% endif %}";

/// A token for each character and three for turns.
fn tokenizer() -> Value {
    let special = ["<user>", "<assistant>", "<end>"];
    let words = "0123456789+=".chars().map(String::from).chain(special.map(String::from));
    let vocab: Map<String, Value> = words.enumerate().map(|(id, word)| (word, id.into())).collect();
    let flags = json!({ "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true });
    let added = special.map(|word| {
        let mut token = flags.clone();
        (token["id"], token["content"]) = (vocab[word].clone(), word.into());
        token
    });
    let model = json!({ "type": "BPE", "vocab": vocab, "merges": [] });
    json!({ "version": "1.0", "added_tokens": added, "decoder": { "type": "Fuse" }, "model": model })
}
