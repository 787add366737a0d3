//! `serve` of a file: one batch has requests for a model and for several adapters of it, each answered as alone.

use std::fs;

use serde_json::{Value, json};

use super::eval::model;
use super::{fail, golden, succeed};

#[test]
fn requests_of_a_file_are_answered_by_the_adapters_that_they_name() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("base")).unwrap();
    model(&folder.path().join("base"));
    let adapter = |kind: &str| golden("lora").join(kind).join("adapter").display().to_string();
    let adapters = [("all", adapter("lora_all")), ("few", adapter("lora_qv_rs")), ("dora", adapter("dora"))];
    let flags: String = adapters.iter().map(|(name, path)| format!(" --adapter {name}={path}")).collect();
    let prompt = |at| format!("w{} w{} w{}", 10 + at, 50 + 7 * at, 90 - at);
    // All four models have the first one.
    let prompts: Vec<String> = [0, 0, 0, 0, 1, 2, 3, 4].map(prompt).into();
    let models = ["base", "all", "few", "dora"];
    let request = |(at, prompt): (usize, &String)| {
        let body =
            json!({"model": models[at % 4], "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true});
        json!({"custom_id": format!("row {at}"), "method": "POST", "url": "/v1/completions", "body": body})
    };
    let mut lines: Vec<Value> = prompts.iter().enumerate().map(request).collect();
    let batch_to = |output: &str| {
        format!(
            "serve --hf base -i requests.jsonl -o {output} --max-num-seqs 3 --max-model-len 64 --num-blocks 64{flags}"
        )
    };
    let batch = batch_to("answers.jsonl");
    let write = |lines: &[Value]| {
        let text: String = lines.iter().map(|line| format!("{line}\r\n")).collect();
        // As an editor may save it.
        fs::write(folder.path().join("requests.jsonl"), format!("\u{feff}{text}")).unwrap();
    };
    write(&lines);
    says!(succeed(folder.path(), &batch), "answers.jsonl: 8 answers");
    let answers = || -> Vec<Value> {
        let text = fs::read_to_string(folder.path().join("answers.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let mut texts = Vec::new();
    for (at, answer) in answers().iter().enumerate() {
        assert_eq!(
            (&answer["custom_id"], &answer["response"]["status_code"]),
            (&json!(format!("row {at}")), &json!(200))
        );
        assert_eq!(answer["response"]["body"]["model"], models[at % 4]);
        let adapter = adapters.iter().find(|(name, _)| *name == models[at % 4]);
        let adapter = adapter.map(|(_, path)| format!("--adapter {path}")).unwrap_or_default();
        let ids = prompts[at].replace('w', "").replace(' ', ",");
        let alone = succeed(
            folder.path(),
            &format!("generate --hf base {adapter} --tokens {ids} --max-new-tokens 8 --greedy --stop-token 159"),
        );
        let alone: Vec<String> = alone.trim().split(',').map(|id| format!("w{}", id.trim())).collect();
        let text = answer["response"]["body"]["choices"][0]["text"].as_str().unwrap().trim().to_string();
        assert_eq!(text.split_whitespace().collect::<Vec<_>>(), alone, "row {at}");
        texts.push(text);
    }
    assert!(texts[1..4].iter().any(|text| *text != texts[0]), "{texts:?}");
    says!(succeed(folder.path(), &batch_to("/dev/null")), "/dev/null: 8 answers");
    says!(fail(folder.path(), &batch_to("/dev/full")), "/dev/full: No space left on device");
    // Without a model there are no answers, and what others have written stays.
    let written = fs::read(folder.path().join("answers.jsonl")).unwrap();
    for output in ["answers.jsonl", "new.jsonl"] {
        for wrong in [batch_to(output).replace("--hf base", "--hf none"), batch_to(output) + " --layout PP2"] {
            fail(folder.path(), &wrong);
        }
    }
    assert_eq!(fs::read(folder.path().join("answers.jsonl")).unwrap(), written);
    assert!(!folder.path().join("new.jsonl").exists());
    // What takes minutes of a large model is said.
    let said = crate::command::run(folder.path(), &batch_to("new.jsonl"));
    says!(crate::command::text(&said.stderr), "reading the weights of base, ", " parameters\n");
    assert_eq!(fs::read(folder.path().join("new.jsonl")).unwrap().len(), written.len());

    // A request that cannot be answered says why in its own line; the others are answered.
    lines[1]["body"]["model"] = "none".into();
    write(&lines);
    says!(fail(folder.path(), &batch), "1 of 8 requests of requests.jsonl have no answer: answers.jsonl says why");
    let found = answers();
    assert_eq!((found.len(), &found[1]["response"]["status_code"]), (8, &json!(404)));
    says!(
        found[1]["response"]["body"]["error"]["message"].as_str().unwrap(),
        "no model `none`",
        "base, all, few, dora"
    );
    for input in ["./requests.jsonl", "base/model.safetensors"] {
        let over = format!("serve --hf base -i requests.jsonl -o {input}");
        says!(fail(folder.path(), &over), &format!("--output-file {input} is an input, which would be lost"));
    }
    fs::write(folder.path().join("requests.jsonl"), "\n{\"custom_id\": 3}\n").unwrap();
    says!(fail(folder.path(), &batch), "requests.jsonl:2: invalid type: integer `3`, expected a string");
}
