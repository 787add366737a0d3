//! `eval`: log-likelihoods are those of transformers in every layout, and metrics those of lm-evaluation-harness.

use std::fs;
use std::path::Path;

use burn::tensor::{Device, FloatDType};
use burn_megatron::forward::{Input, Settings, forward};
use burn_megatron::hf::HfFolder;
use safetensors::SafeTensors;
use serde_json::{Value, json};

use super::{fail, golden, read, succeed};

const VOCAB: usize = 160;
const SEQ: usize = 24;

/// The base model of the adapters with a tokenizer whose words are `w0` to `w159`.
pub(super) fn model(folder: &Path) {
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        fs::copy(golden("lora/base").join(file), folder.join(file)).unwrap();
    }
    let vocab: serde_json::Map<String, Value> = (0..VOCAB).map(|id| (format!("w{id}"), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    fs::write(folder.join("tokenizer_config.json"), json!({"bos_token": "w1", "eos_token": "w2"}).to_string()).unwrap();
}

fn words(ids: &[i64]) -> String {
    ids.iter().map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ")
}

fn write_rows(path: &Path, rows: &[Value]) {
    fs::write(path, rows.iter().map(|row| format!("{row}\n")).collect::<String>()).unwrap();
}

fn lines(path: &Path) -> Vec<Value> {
    fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Token ids and log-probabilities `[2, 24, 160]` of the oracle with an adapter.
fn oracle() -> (Vec<i64>, Vec<f64>) {
    let path = golden("lora/lora_all/oracle.safetensors");
    let bytes = fs::read(&path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let ids =
        file.tensor("input_ids").unwrap().data().chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
    (ids, log_softmax(&read(&path)["logits"].data))
}

fn log_softmax(logits: &[f64]) -> Vec<f64> {
    let row = |row: &[f64]| {
        let sum = row.iter().map(|logit| logit.exp()).sum::<f64>().ln();
        row.iter().map(|logit| logit - sum).collect::<Vec<_>>()
    };
    logits.chunks_exact(VOCAB).flat_map(row).collect()
}

fn best(row: &[f64]) -> usize {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap()
}

#[test]
fn log_likelihoods_are_those_of_transformers_in_every_layout() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let (ids, log_probabilities) = oracle();
    let at = |sequence: usize, position: usize| {
        let start = (sequence * SEQ + position) * VOCAB;
        &log_probabilities[start..start + VOCAB]
    };
    let (mut choices, mut expected) = (Vec::new(), Vec::new());
    for (sequence, length) in [(0, 1), (0, 7), (0, 23), (1, 12), (1, 20)] {
        let tokens = &ids[sequence * SEQ..][..length];
        let row = at(sequence, length - 1);
        let options = [best(row), 5, 77, 141];
        choices.push(json!({
            "context": words(tokens), "continuations": options.map(|id| format!(" w{id}")), "answer": choices.len() % 2
        }));
        expected.push(options.map(|id| row[id]));
    }
    write_rows(&folder.path().join("choice.jsonl"), &choices);
    let (mut rest, mut sums) = (Vec::new(), Vec::new());
    for (sequence, length) in [(0, 1), (0, 20), (1, 5)] {
        let tokens = &ids[sequence * SEQ..][..SEQ];
        rest.push(json!({"context": words(&tokens[..length]) + " ", "continuation": words(&tokens[length..])}));
        sums.push((length..SEQ).map(|position| at(sequence, position - 1)[tokens[position] as usize]).sum::<f64>());
    }
    write_rows(&folder.path().join("rest.jsonl"), &rest);

    let adapter = golden("lora/lora_all/adapter").display().to_string();
    let command = format!("eval --hf . --adapter {adapter} --task choice.jsonl rest.jsonl --output samples.jsonl");
    let layouts = [
        ("", 1e-4),
        ("--dtype f64 --batch-size 1", 1e-9),
        ("--dtype f64 --tensor-parallel 2 --batch-size 3", 1e-9),
        ("--dtype f64 --tensor-parallel 4 --sequence-parallel=false", 1e-9),
        ("--dtype f64 --context-parallel 2", 1e-9),
        ("--dtype f64 --data-parallel 3 --batch-size 2", 1e-9),
        ("--dtype f64 --tensor-parallel 2 --context-parallel 2 --data-parallel 2", 1e-9),
    ];
    for (layout, tolerance) in layouts {
        let said = succeed(folder.path(), &format!("{command} {layout}"));
        let samples = lines(&folder.path().join("samples.jsonl"));
        assert_eq!(samples.len(), 8, "{layout}");
        for (sample, expected) in samples.iter().zip(&expected) {
            for (found, expected) in sample["loglikelihood"].as_array().unwrap().iter().zip(expected) {
                let found = found.as_f64().unwrap();
                assert!((found - expected).abs() < tolerance, "{layout}: {found} {expected}");
            }
            assert_eq!(sample["is_greedy"], json!([true, false, false, false]), "{layout}");
            assert_eq!((&sample["prediction"], &sample["kind"]), (&json!(0), &json!("multiple_choice")));
        }
        for (sample, expected) in samples[5..].iter().zip(&sums) {
            let found = sample["loglikelihood"].as_f64().unwrap();
            assert!((found - expected).abs() < tolerance * 20.0, "{layout}: {found} {expected}");
            assert_eq!(sample["is_greedy"], false, "a random text is not the likeliest");
        }
        // Three of five answers are the likeliest continuation.
        let acc = said.lines().find(|line| line.starts_with("choice") && line.contains(" acc ")).unwrap();
        assert!(acc.contains("0.6000  0.2449"), "{said}");
    }
}

/// With LongRoPE the angles of all positions change beyond the original context, and those of cached keys cannot.
#[test]
fn texts_beyond_the_original_context_of_longrope_are_refused_with_the_length_that_is_not() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let path = folder.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["rope_parameters"] = json!({
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.0, 1.0, 1.0], "long_factor": [2.0, 2.0, 2.0, 2.0],
    });
    fs::write(&path, config.to_string()).unwrap();
    let row = json!({"context": words(&(3..20).collect::<Vec<_>>()), "target": "w3", "max_new_tokens": 4});
    write_rows(&folder.path().join("task.jsonl"), &[row]);
    let message = fail(folder.path(), "eval --hf . --task task.jsonl");
    says!(message, "a context of 17 tokens and 4 new ones", "at most 16 positions; nearest legal: --max-length 16");
    says!(succeed(folder.path(), "eval --hf . --task task.jsonl --max-length 16"), "exact_match");
}

#[test]
fn perplexity_goes_over_rolling_windows() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let (ids, _) = oracle();
    let text = words(&ids[..30]);
    fs::write(folder.path().join("book.txt"), &text).unwrap();
    let said = succeed(
        folder.path(),
        "eval --hf . --perplexity book.txt --max-length 8 --dtype f64 --output out.jsonl --tensor-parallel 2",
    );
    // Eight tokens a window; the last has six new ones and two of the window before.
    let base = HfFolder::open(folder.path()).unwrap();
    let stream = [&[1], &ids[..30]].concat();
    let settings = Settings::new([Device::flex()], "TP1".parse().unwrap(), FloatDType::F64);
    let mut expected = 0.0;
    for (start, scored) in [(0, 8), (8, 8), (16, 8), (22, 6)] {
        let input = Input { sequences: 1, seq: 8, ids: stream[start..start + 8].to_vec(), labels: None };
        let logits = log_softmax(&forward(base.config(), &base, &input, &settings).unwrap().logits);
        expected += (8 - scored..8).map(|at| logits[at * VOCAB + stream[start + at + 1] as usize]).sum::<f64>();
    }
    let sample = &lines(&folder.path().join("out.jsonl"))[0];
    let found = sample["loglikelihood"].as_f64().unwrap();
    assert!((found - expected).abs() < 1e-9, "{found} {expected}");
    assert_eq!((&sample["tokens"], &sample["words"], &sample["bytes"]), (&json!(30), &json!(30), &json!(text.len())));
    let bits = format!("{:.4}", -expected / text.len() as f64 / 2f64.ln());
    assert!(said.contains("bits_per_byte") && said.contains(&bits), "{said} {bits}");
    assert!(said.contains(&format!("{:.4}", (-expected / 30.0).exp())), "{said}");
}

#[test]
fn answers_are_what_generate_writes_up_to_their_end() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let prompt = "w7 w20 w45";
    let generated = std::process::Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .args(["generate", "--hf", ".", "--prompt", prompt, "--max-new-tokens", "6"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    let text = String::from_utf8(generated.stdout).unwrap();
    let answer: Vec<&str> = text.strip_prefix(prompt).unwrap().split_whitespace().collect();
    assert_eq!(answer.len(), 6, "{text}");
    let end = (1..6).find(|at| !answer[..*at].join(" ").contains(answer[*at])).unwrap();
    let rows = [
        json!({"context": prompt, "target": [answer.join(" "), "w1"], "max_new_tokens": 6}),
        json!({"context": prompt, "target": answer.join(" ").to_uppercase(), "max_new_tokens": 6}),
        json!({"context": prompt, "target": answer[..end].join(" "), "until": [answer[end]], "max_new_tokens": 6}),
        json!({"context": prompt, "target": "w1", "max_new_tokens": 2}),
    ];
    write_rows(&folder.path().join("write.jsonl"), &rows);
    for (flags, right) in [("", 2), ("--tensor-parallel 2 --data-parallel 2 --ignore-case", 3)] {
        succeed(folder.path(), &format!("eval --hf . --task write.jsonl --output out.jsonl {flags}"));
        let samples = lines(&folder.path().join("out.jsonl"));
        assert_eq!(samples[0]["output"].as_str().unwrap().trim(), answer.join(" "), "{flags}");
        assert_eq!(samples[2]["exact_match"], 1.0, "{flags}: {}", samples[2]);
        let matched: f64 = samples.iter().map(|sample| sample["exact_match"].as_f64().unwrap()).sum();
        assert_eq!(matched, f64::from(right), "{flags}");
    }
}

#[test]
fn what_cannot_be_evaluated_is_refused_with_file_and_line() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let refuse = |rows: &[Value], flags: &str| {
        write_rows(&folder.path().join("t.jsonl"), rows);
        fail(folder.path(), &format!("eval --hf . --task t.jsonl {flags}"))
    };
    let good = json!({"context": "w3", "continuation": " w4"});
    let long = json!({"context": "w3", "continuation": format!(" {}", words(&[9; 200]))});
    assert!(refuse(&[good.clone(), long], "").contains("t.jsonl:2: continuation: 200 tokens, the model takes 128"));
    assert!(refuse(&[json!({"context": "w3"})], "").contains("t.jsonl:1: none of continuations, continuation, target"));
    assert!(
        refuse(std::slice::from_ref(&good), "--pipeline-parallel 2")
            .contains("pipeline-parallel 2 is for training only")
    );
    assert!(refuse(std::slice::from_ref(&good), "--tensor-parallel 3").contains("nearest legal"));
    assert!(refuse(std::slice::from_ref(&good), "--limit 0").contains("--limit 0"));
    assert!(fail(folder.path(), "eval --hf .").contains("--task FILE or --perplexity FILE says what to evaluate"));
    assert!(refuse(std::slice::from_ref(&good), "--apply-chat-template").contains("there is no chat template"));
    let answer = json!({"context": "w3", "target": "w4"});
    assert!(refuse(&[answer], "").contains("max_new_tokens: 256 leave no room"));
    let short = json!({"context": "w3", "target": "w4", "max_new_tokens": 2});
    for (flags, words) in [
        (
            "--data-parallel 2 --expert-tensor-parallel 2",
            "expert-tensor-parallel 2: tasks with a `target` generate texts",
        ),
        ("--data-parallel 4 --tensor-parallel 2 --expert-tensor-parallel 4", "write the same one; nearest legal: 2"),
        ("--data-parallel 2 --expert-parallel 2", "expert-parallel 2: tasks with a `target` generate texts"),
    ] {
        says!(refuse(std::slice::from_ref(&short), flags), words);
    }
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    assert!(refuse(&[good], "").contains("tokenizer.json: there is no such file"));
}

/// Tasks during training: with a learning rate of nothing their metrics are those of the command, in layouts that the
/// command does not have too.
#[test]
fn tasks_are_scored_while_a_model_trains() {
    let folder = tempfile::tempdir().unwrap();
    model(folder.path());
    let at = |name: &str| folder.path().join(name);
    let (ids, _) = oracle();
    let row = |start: usize| json!({"context": words(&ids[start..start + 5]), "continuations": [" w7", " w9 w20", " w31"], "answer": start % 3});
    write_rows(&at("choice.jsonl"), &(0..11).map(row).collect::<Vec<_>>());
    let rest = json!({"context": words(&ids[..4]), "continuation": format!(" {}", words(&ids[4..12]))});
    write_rows(&at("rest.jsonl"), &[rest]);
    fs::write(at("book.txt"), (0..40).map(|n| words(&ids[n % 20..n % 20 + 20]) + "\n\n").collect::<String>()).unwrap();
    let table = succeed(folder.path(), "eval --hf . --task choice.jsonl rest.jsonl --dtype f64");
    for (name, overrides) in [
        ("one", vec![]),
        ("pipeline", vec![("parallel.pp", "2"), ("parallel.tp", "2"), ("training.micro-batch", "2")]),
        ("zero", vec![("parallel.dp", "2"), ("parallel.zero", "3"), ("parallel.cp", "2")]),
    ] {
        let text = format!(
            "[model]\nhf = {:?}\n[training]\nsteps = 1\nglobal-batch = 4\nseq-length = 16\ndtype = \"f64\"\n[lr]\nmax = 1e-12\n\
             [data]\ntext = [{:?}]\nsplit = \"80,20,0\"\neod-id = 2\n[evaluation]\nbatches = 1\ntasks = [{:?}, {:?}]\n\
             [checkpoint]\ndirectory = \"none\"\n[output]\ndirectory = {:?}\n",
            folder.path(),
            at("book.txt"),
            at("choice.jsonl"),
            at("rest.jsonl"),
            at(name)
        );
        let config = super::parse(&text, &overrides);
        let plan = burn_megatron::train::Plan::new(&config, &[]).unwrap();
        burn_megatron::train::train(&plan, vec![Device::flex()], &mut |_| ()).unwrap();
        let lines = lines(&at(name).join("steps.jsonl"));
        let tasks = lines.iter().find(|line| line["kind"] == "tasks").unwrap();
        for (task, metric) in
            [("choice", "acc"), ("choice", "acc_norm"), ("choice", "acc_bytes"), ("rest", "perplexity")]
        {
            let line =
                table.lines().find(|line| line.starts_with(task) && line.contains(&format!(" {metric} "))).unwrap();
            let expected: f64 = line.split_whitespace().nth(4).unwrap().parse().unwrap();
            let found = tasks[format!("{task}/{metric}")].as_f64().unwrap();
            // The table has four digits; transformers' rounding of norms to fp32 is no part of training.
            assert!((found - expected).abs() < 1e-4 * expected.max(1.0), "{name}: {task} {metric} {found} {expected}");
        }
        assert!(tasks.get("rest/acc").is_none(), "the likeliest tokens are not known");
    }
}
