//! Every command that launches ranks gives in several processes what it gives in one, once.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::Duration;

use safetensors::{SafeTensors, serialize_to_file};
use serde_json::Value;

use super::{Ended, all, command, ended, run, start};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden").join(name)
}

/// What one process prints, and the same of the first of several, whose others print nothing.
fn outputs(folder: &Path, arguments: impl Fn(usize) -> String, processes: &[usize]) -> Vec<String> {
    let said = |count: &usize| {
        let ended = match count {
            1 => vec![ended(command(folder, &arguments(1), None).spawn().unwrap(), Duration::from_secs(240))],
            count => run(folder, &arguments(*count), *count),
        };
        for (process, Ended { status, stdout, stderr }) in ended.iter().enumerate() {
            assert!(status.success(), "{}, process {process} of {count}: {stdout}{stderr}", arguments(*count));
            assert_eq!(stdout.is_empty(), process > 0, "process {process} of {count}: {stdout}");
        }
        ended.into_iter().next().unwrap().stdout
    };
    processes.iter().map(said).collect()
}

/// Asserts that all processes give the words of one, which are returned.
fn same(folder: &Path, arguments: &str, processes: &[usize]) -> String {
    let mut all = outputs(folder, |_| arguments.into(), &[&[1], processes].concat());
    // How long it took.
    all.iter_mut().for_each(|text| {
        let kept = text.lines().map(|line| line.split(" (").next().unwrap_or(line)).collect::<Vec<_>>().join("\n");
        *text = kept;
    });
    assert!(all.iter().all(|text| *text == all[0]), "{arguments}: {all:#?}");
    all.swap_remove(0)
}

#[test]
fn verify_and_replay_have_the_figures_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let four = "--layout TP2+SP+DP2+ZeRO1 --layout TP2+PP2";
    let table = same(folder, &format!("verify --steps 2 {four} --layout DP2+ZeRO3 --layout PP2+x2"), &[2]);
    says!(table, "4 of 4 layouts equal one device within 1e-10");
    same(folder, &format!("verify --steps 2 {four}"), &[4]);
    // Which experts tokens would have used is counted over all processes.
    let rerouted = same(folder, "verify --model mixtral --dtype bf16 --size tiny --layout DP2+EP2", &[2]);
    says!(rerouted, "of the choices would have been others");
    same(folder, "verify --curve 3 --layout TP2", &[2]);
    let left_out = run(folder, "verify --steps 1 --ranks 2 --sample 2", 2).swap_remove(0).stdout;
    says!(left_out, "2 of 2 layouts", "(the number of ranks is no multiple");

    let recorded = golden("megatron/dense");
    let replay = same(folder, &format!("replay {} --layouts TP2,PP2+DP2", recorded.display()), &[2]);
    says!(replay, "2 of 2 layouts equal Megatron's run");
}

/// A file of what a model takes of its recorded tensors.
fn inputs(model: &Path, folder: &Path) -> PathBuf {
    let bytes = fs::read(model.join("oracle.safetensors")).unwrap();
    let recorded = SafeTensors::deserialize(&bytes).unwrap();
    let names = ["input_ids", "token_type_ids", "attention_mask", "labels"];
    let kept = names.into_iter().filter_map(|name| Some((name, recorded.tensor(name).ok()?)));
    let file = folder.join("inputs.safetensors");
    serialize_to_file(kept, None, &file).unwrap();
    file
}

#[test]
fn forward_and_generate_have_the_bytes_of_one_process() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (model, layouts) in [
        (
            "llama3",
            &[("--tensor-parallel 2", 2), ("--tensor-parallel 2 --data-parallel 2", 2), ("--context-parallel 4", 4)][..],
        ),
        ("mixtral", &[("--data-parallel 2 --expert-parallel 2", 2)]),
        // A plain Burn module, whose operations the second process hears of over the network.
        ("bert", &[("--tensor-parallel 2", 2)]),
    ] {
        let from = golden("hf").join(model);
        let input = inputs(&from, folder);
        for (layout, processes) in layouts {
            let output = |count: usize| folder.join(format!("{model}-{count}.safetensors"));
            let arguments = |count: usize| {
                let [from, input, to] = [&from, &input, &output(count)].map(|path| path.display().to_string());
                format!("forward --hf {from} --input {input} --output {to} --grads --dtype f64 {layout}")
            };
            outputs(folder, arguments, &[1, *processes]);
            let [one, several] = [1, *processes].map(|count| fs::read(output(count)).unwrap());
            assert!(one == several, "{model} {layout} in {processes} processes");
        }
    }
    let from = golden("hf/llama3");
    let arguments = format!("generate --hf {} --tokens 5,6,7 --max-new-tokens 12", from.display());
    let ids = same(folder, &format!("{arguments} --tensor-parallel 2 --temperature 0.8 --seed 3"), &[2]);
    assert_eq!(ids.split(',').count(), 12, "{ids}");
}

#[test]
fn eval_and_bench_have_one_table_and_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text: String = (0..400).map(|i| format!("Line {i} says that {i} times {i} is {}.\n\n", i * i)).collect();
    fs::write(folder.join("book.txt"), &text).unwrap();
    for arguments in [
        "train --model.preset tiny --parallel.tp 1 --training.steps 1 --training.global-batch 4 --training.seq-length 32 --data.text book.txt \
         --data.tokenizer byte --output.directory run --checkpoint.every 1 --device cpu",
        "export --checkpoint run/checkpoints --hf hf",
    ] {
        let Ended { status, stdout, stderr } =
            ended(command(folder, arguments, None).spawn().unwrap(), Duration::from_secs(240));
        assert!(status.success(), "{stdout}{stderr}");
    }
    // A text begins with this token.
    fs::write(folder.join("hf/generation_config.json"), r#"{"eos_token_id": 10}"#).unwrap();
    let rows = [
        r#"{"context": "Line 3 says", "continuations": [" that 3", " this"], "answer": 0}"#,
        r#"{"context": "Line 4", "target": "says", "max_new_tokens": 4}"#,
    ];
    for (file, row) in ["choose.jsonl", "write.jsonl"].into_iter().zip(rows) {
        fs::write(folder.join(file), row).unwrap();
    }
    fs::write(folder.join("some.txt"), &text[..600]).unwrap();
    let layout = "--tensor-parallel 2 --data-parallel 2";
    let arguments = |count| {
        format!(
            "eval --hf hf --task choose.jsonl write.jsonl --perplexity some.txt --output answers{count}.jsonl --dtype f64 {layout}"
        )
    };
    let tables = outputs(folder, arguments, &[1, 2, 4]);
    let answers = |count| fs::read(folder.join(format!("answers{count}.jsonl"))).unwrap();
    for (count, table) in [1, 2, 4].into_iter().zip(&tables) {
        assert!(*table == tables[0] && answers(count) == answers(1), "{count} processes: {table}");
    }

    // A text that the first process tokenizes, and a timeline of all ranks.
    let short = "--steps 1 --warmup 1 --runs 1 --device cpu";
    let model = "--data.text book.txt --data.tokenizer byte --model.vocab-size 512";
    let arguments = |count| {
        format!(
            "bench tiny --layouts TP2+DP2,DP2+ZeRO1 {short} {model} --output.directory bench{count} --out bench{count}.json --log.trace \
             trace{count}.json"
        )
    };
    let tables = outputs(folder, arguments, &[1, 2]);
    let loss = |count: usize, layout: &str| {
        let record = fs::read(folder.join(format!("bench{count}-{layout}.json"))).unwrap();
        let record: Value = serde_json::from_slice(&record).unwrap();
        assert_eq!(record["ranks"].as_array().unwrap().len(), record["setup"]["ranks"].as_u64().unwrap() as usize);
        [record["first_loss"].clone(), record["last_loss"].clone()]
    };
    for layout in ["tp2-dp2", "dp2-zero1"] {
        assert_eq!(loss(2, layout), loss(1, layout), "{layout}");
    }
    for table in tables {
        assert_eq!(["on 4 ranks", "on 2 ranks"].map(|ranks| table.matches(ranks).count()), [1, 1], "{table}");
    }
    let timeline: Value = serde_json::from_slice(&fs::read(folder.join("trace2.json")).unwrap()).unwrap();
    let ranks = timeline["traceEvents"].as_array().unwrap().iter().filter_map(|event| event["tid"].as_u64());
    assert_eq!(ranks.collect::<BTreeSet<_>>(), BTreeSet::from([0, 1]));
    // Without a number of ranks a recipe has one for each process.
    let dry = run(folder, &format!("bench tiny {short} --dry-run"), 4);
    assert!(dry[0].stdout.contains("DP4") && dry[1].stdout.is_empty(), "{}{}", dry[0].stdout, dry[0].stderr);
}

#[test]
fn what_goes_wrong_in_one_process_ends_all_with_its_words() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let failing = |children: Vec<Child>, words: &[&str]| {
        for child in children {
            let Ended { status, stdout, stderr } = ended(child, Duration::from_secs(60));
            assert_eq!(status.code(), Some(1), "{stdout}{stderr}");
            assert!(words.iter().all(|word| stderr.contains(word)), "{words:?} in {stderr}");
        }
    };
    // A layout that differs is no error, and the exit code of all processes.
    for Ended { status, stderr, .. } in run(folder, "verify --steps 1 --layout TP2 --tolerance 0", 2) {
        assert_eq!((status.code(), stderr.as_str()), (Some(1), ""));
    }
    failing(
        start(folder, "verify --layout TP2+DP2 --layout DP2", &all(4)),
        &["--layout \"DP2\": 2 ranks (DP2) cannot be shared out over 4 processes"],
    );
    // The first process alone writes.
    let llama = golden("hf/llama3");
    let forward = format!("forward --hf {0} --input {0}/oracle.safetensors --tensor-parallel 2", llama.display());
    failing(start(folder, &format!("{forward} --output no/such/folder"), &all(2)), &["cannot write no/such/folder"]);
    let said = run(folder, &format!("{forward} --output no/such/folder"), 2).swap_remove(1).stderr;
    says!(said, "process 0 failed: cannot write");
    // Arguments that differ.
    let two = all(2);
    let children = two.iter().zip(["3", "4"]);
    let children = children.map(|(process, seed)| {
        command(folder, &format!("verify --layout TP2 --seed {seed} --steps 1"), Some(process)).spawn().unwrap()
    });
    failing(children.collect(), &["has arguments --seed 3", "has arguments --seed 4"]);
    // It talks to a user.
    failing(start(folder, "chat --hf hf", &all(2)), &["runs in one process", "WORLD_SIZE"]);
}

#[test]
fn a_killed_process_ends_the_others_wherever_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let generate = format!(
        "generate --hf {} --tokens 5,6,7 --max-new-tokens 100000 --window 32 --tensor-parallel 2",
        golden("hf/llama3").display()
    );
    // Within a launch; within one of many, or between two.
    for arguments in [generate.as_str(), "verify --steps 1 --ranks 4"] {
        for victim in [0, 1] {
            let mut children = start(folder.path(), arguments, &all(2));
            let mut first = children[0].stdout.take().unwrap();
            first.read_exact(&mut [0]).unwrap();
            let mut dead = children.remove(victim);
            assert!(dead.try_wait().unwrap().is_none(), "{arguments} ended early");
            dead.kill().unwrap();
            dead.wait().unwrap();
            let Ended { status, stderr, .. } = ended(children.remove(0), Duration::from_secs(90));
            assert_eq!(status.code(), Some(1), "{stderr}");
            assert!(
                stderr.contains(&format!("process {victim} on ")) && stderr.contains("is gone"),
                "{arguments}: {stderr}"
            );
        }
    }
}
