//! `verify`, `replay` and `inspect` of checkpoints from the command line: what they print, and the exit code.

#[macro_use]
#[path = "../support/says.rs"]
mod says;

#[path = "../support/command.rs"]
mod command;

mod plans;

use std::path::Path;
use std::process::Output;

use burn_megatron::checkpoint::{Kind, RunState, Saver, SaverOptions, Slice};
use command::text;
use safetensors::Dtype;

fn run(arguments: &str) -> Output {
    command::run(Path::new("."), arguments)
}

fn succeed(arguments: &str) -> String {
    command::succeed(Path::new("."), arguments)
}

/// What a command says that must fail, also as one that is no command.
fn fail(arguments: &str) -> String {
    let output = run(arguments);
    assert!(!output.status.success(), "{arguments}: {}", text(&output.stdout));
    text(&output.stderr)
}

fn recorded(name: &str) -> String {
    format!("{}/../tests/golden/megatron/{name}", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn verify_prints_a_row_per_layout_and_fails_past_the_tolerance() {
    let layouts = "verify --steps 1 --model gpt --layout TP2 --layout DP2";
    let table = succeed(layouts);
    assert_eq!(table.lines().filter(|line| line.ends_with("  equal")).count(), 2, "{table}");

    let output = run(&format!("{layouts} --tolerance 1e-30"));
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("DIFFERENT: "), "{}", text(&output.stdout));
}

#[test]
fn verify_names_what_does_not_fit() {
    for (arguments, words) in [
        ("--layout TP3", "nearest legal: 2, 4"),
        ("--layout PP3", "nearest legal: layers 3"),
        ("--layout EP2", "expert-parallel 2"),
        ("--layout CP3", "not a multiple of 6"),
        ("--layout XY2", "XY2"),
        ("--layouts TP2,DP2+ZeRO1", "is a list, or one layout with commas; give --layout for each"),
        ("--layout DP3", "--global-batch 8"),
        ("--steps 0", "nothing to verify"),
    ] {
        says!(fail(&format!("verify {arguments}")), words);
    }
}

#[test]
fn verify_runs_in_every_precision() {
    let half = "within 3.1e-2 x 1.03^(L + 1 - l)";
    for (what, bound) in [("f32", "within 1e-5"), ("bf16", half), ("bf16 --model mixtral", half)] {
        let table = succeed(&format!("verify --size tiny --dtype {what} --layout TP2 --layout PP2"));
        says!(table, &format!("2 of 2 layouts equal one device {bound}"));
    }
    for (arguments, words) in [
        ("--dtype f16", "legal: f64, f32, bf16"),
        ("--dtype bf16 --steps 2", "nearest legal: 1"),
        ("--dtype bf16 --curve 5", "--curve compares f32 or f64"),
    ] {
        says!(fail(&format!("verify {arguments}")), words);
    }
}

/// One device takes as many micro-batches as a layout and its data-parallel ranks.
#[test]
fn verify_emulates_fp8() {
    for (arguments, layouts) in [
        ("--fp8 hybrid --steps 2", "--layout TP4+SP --layout CP2+DP2+ZeRO3 --layout PP2+DP2"),
        ("--fp8 e4m3 --model mixtral --steps 1", "--layout DP2+EP2 --layout TP2+CP2+EP2+ETP1"),
    ] {
        let table = succeed(&format!("verify {arguments} {layouts}"));
        let all = layouts.matches("--layout").count();
        says!(table, &format!("{all} of {all} layouts equal one device within 1e-10"), " in f64 and FP8 (");
    }
    // Four ranks share two key-value heads.
    let table = succeed("verify --fp8 hybrid --steps 1 --size tiny --ranks 4 --seq-length 64 --sample 2");
    says!(table, "2 of 2 layouts equal", "\nleft out: ", "the same key-value head");
    for (arguments, words) in [
        ("--fp8 hybrid --dtype bf16", "nearest legal: --dtype f64"),
        ("--fp8 hybrid --device cuda", "nearest legal: --device cpu"),
        ("--fp8 e5m2", "[possible values: e4m3, hybrid]"),
        ("--fp8 hybrid --curve 3", "cannot be used with"),
        (
            "--fp8 hybrid --kv-heads 2 --layout TP4",
            "--layout \"TP4\" has other numbers in FP8 than one device: ranks that hold",
        ),
        ("--fp8 hybrid --hidden 40 --heads 5 --kv-heads 5", "no GEMM of these sizes is in FP8"),
    ] {
        says!(fail(&format!("verify {arguments}")), words);
    }
}

#[test]
fn verify_compares_loss_curves() {
    let lines = succeed("verify --dtype f32 --curve 50 --layout TP2 --layout DP2");
    assert!(lines.starts_with("TP2 on cpu, f32: 50 steps, loss ") && lines.contains("\nDP2 on cpu, f32: "), "{lines}");
    assert_eq!(lines.matches("allowed 1e-4: equal").count(), 2, "{lines}");
}

/// With GPUs or without: the exit code is about what is missing.
#[test]
fn doctor_names_what_is_there_and_what_is_missing() {
    let output = run("doctor");
    let shown = text(&output.stdout);
    for what in ["CPU", "memory", "disk", "--device cpu"] {
        assert!(shown.contains(what), "{shown}{}", text(&output.stderr));
    }
    assert_eq!(output.status.success(), !shown.contains("MISSING"), "{shown}");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn gpus_need_a_program_built_for_them() {
    let folder = recorded("tied");
    for command in ["verify --layout TP2", &format!("replay {folder}")] {
        says!(fail(&format!("{command} --device cuda")), "--device cuda: ", "cargo build --release --features cuda");
    }
}

#[test]
fn replay_goes_through_a_list_of_layouts() {
    let lines = succeed(&format!("replay {} --layouts TP2,PP2", recorded("tied")));
    assert!(lines.contains("\nTP2 ") && lines.ends_with("2 of 2 layouts equal Megatron's run\n"), "{lines}");
    says!(fail(&format!("replay {} --layouts auto --ranks 7", recorded("tied"))), "no layout of 7 ranks fits");
}

#[test]
fn replay_prints_every_step_beside_megatrons() {
    let table = succeed(&format!("replay {} --tensor-model-parallel-size 2 --sequence-parallel", recorded("tied")));
    says!(table, "in TP2 SP, F64", "4.912880");
    assert!(table.trim_end().ends_with("equal"), "{table}");

    says!(fail("replay no/such/folder"), "no/such/folder/metrics.json");
}

#[test]
fn inspect_shows_a_checkpoint_and_finds_damage() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().display().to_string();
    let state = |step| RunState {
        step,
        consumed_samples: 16 * step,
        updates: step,
        skipped_samples: Some(0),
        layout: "TP2".parse().unwrap(),
        world_size: 2,
        model: serde_json::json!({"family": "llama"}),
        ..RunState::default()
    };
    let half = |rank: usize| Slice {
        kind: Kind::Weight,
        name: "norm.weight".into(),
        global_shape: vec![4],
        ranges: vec![2 * rank..2 * rank + 2],
        dtype: Dtype::F32,
        data: vec![0; 8].into(),
    };
    let saver = Saver::new(folder.path(), 2, SaverOptions::default()).unwrap();
    for step in [1000, 2000] {
        (0..2).for_each(|rank| saver.submit(rank, vec![half(rank)], &state(step)).unwrap());
    }
    let shown = succeed(&format!("inspect {root} --verify"));
    for words in [
        "step_00002000",
        "step 2,000, 32,000 samples consumed, 2,000 updates; saved by 2 ranks in TP2",
        "{\"family\":\"llama\"}",
        "weight: 1 tensor, 16 B",
        "norm.weight [4]: weight F32 in 2 slices",
        "also there, complete: step 1000",
        "every file has its sha256",
    ] {
        assert!(shown.contains(words), "`{words}` is missing in\n{shown}");
    }
    let missing = fail(&format!("inspect {root}/step_00003000 --verify"));
    says!(missing, "step_00003000: there is no such folder; the newest is ", "step_00002000");
    says!(fail("inspect /no/such/step_1 --verify"), "/no/such/step_1: there is no such folder");

    let file = folder.path().join("step_00002000/rank_00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    says!(fail(&format!("inspect {root} --verify")), "rank_00001.safetensors");
}

#[test]
fn a_command_that_lacks_a_model_or_a_folder_names_all_that_it_takes() {
    says!(fail("generate --prompt x"), "--hf DIR or --checkpoint DIR says where the model is");
    says!(fail("export --checkpoint runs"), "--hf, --dcp, --torch-dist or --adapter DIR says where to write");
    says!(fail("export --hf out"), "--checkpoint CKPT or --from-hf DIR says what to write");
    // Before any hash is compared.
    says!(fail("export --checkpoint none --hf src"), "src: is not empty");
}

/// A file that a command reads, and a model's in a folder that it reads, are never its output.
#[test]
fn what_is_read_is_not_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let run = "[model]\npreset = \"tiny\"\n[data]\ntext = [\"book.txt\"]\ntokenizer = \"byte\"\n";
    let files = [
        ("book.txt", "a book"),
        ("run.toml", run),
        ("model.safetensors", "weights"),
        ("config.json", "{}"),
        ("data.bin", "tokens"),
        ("data.idx", "their places"),
    ];
    files.iter().for_each(|(name, text)| std::fs::write(folder.path().join(name), text).unwrap());
    for (command, flag) in [
        ("eval --hf . --perplexity book.txt --output ./book.txt", "--output ./book.txt"),
        ("eval --hf . --perplexity book.txt --output config.json", "--output config.json"),
        ("forward --hf . --input book.txt --output book.txt", "--output book.txt"),
        ("forward --hf . --input book.txt --output ./model.safetensors", "--output ./model.safetensors"),
        ("preprocess --chat --input book.txt --tokenizer . --output config.json", "--output config.json"),
        ("plan run.toml --svg ./run.toml", "--svg ./run.toml"),
        ("bench run.toml --out run.toml", "--out run.toml"),
        ("bench run.toml --out book.txt", "--out book.txt"),
        ("bench book.txt --chart book.txt", "--chart book.txt"),
        ("train run.toml --dry-run --trace run.toml", "log.trace = run.toml"),
        ("train run.toml --dry-run --trace book.txt", "log.trace = book.txt"),
        ("train run.toml --dry-run --log.jsonl book.txt", "log.jsonl = book.txt"),
        ("inspect data --seq-length 1 --out ./data.bin", "--out ./data.bin"),
        ("inspect data --seq-length 1 --out data.idx", "--out data.idx"),
        ("train run.toml --write-top-k book.txt", "--write-top-k book.txt"),
    ] {
        let said = command::fail(folder.path(), command);
        says!(said, &format!("{flag} is an input, which would be lost; name another file"));
    }
    // Before anything is computed, too.
    let said = command::fail(folder.path(), "forward --hf no/such --input book.txt --output none/out.safetensors");
    says!(said, "error: cannot write none/out.safetensors: No such file or directory");
    files.iter().for_each(|(name, text)| assert_eq!(std::fs::read_to_string(folder.path().join(name)).unwrap(), *text));
}

/// An error that nobody reads is still that error.
#[test]
fn the_exit_code_needs_no_reader() {
    let full = || std::fs::File::create("/dev/full").unwrap();
    let program = std::process::Command::new(env!("CARGO_BIN_EXE_burn-megatron"))
        .args(["plan", "no/such.toml"])
        .stdout(full())
        .stderr(full())
        .status();
    assert_eq!(program.unwrap().code(), Some(1));
}

/// Where the lines are all of a result, they are missed.
#[test]
fn the_exit_code_tells_of_lines_that_were_not_written() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("book.txt"), "some words\n\n".repeat(50)).unwrap();
    std::fs::write(folder.path().join("run.toml"), "[data]\ntext = [\"book.txt\"]\n[training]\nseq-length = 16\n")
        .unwrap();
    let to = |command: &str, out: &str| {
        let words = format!("exec \"$0\" {command} {out}");
        let mut shell = std::process::Command::new("bash");
        shell.args(["-c", &words, env!("CARGO_BIN_EXE_burn-megatron")]).current_dir(folder.path()).output().unwrap()
    };
    let recorded = format!("replay {}", recorded("tied"));
    let doctor = if run("doctor").status.success() { Some("doctor") } else { None };
    let verify = "verify --size tiny --steps 1 --layout TP2";
    for command in [verify, "train run.toml --dry-run", "plan run.toml", &recorded].into_iter().chain(doctor) {
        let refused = to(command, "> /dev/full");
        assert_eq!(refused.status.code(), Some(1), "{command}");
        says!(text(&refused.stderr), "error: cannot write to standard output: No space left on device");
        // A reader that has seen enough is no failure.
        let closed = to(command, "> >(exec head -c 0)");
        assert_eq!(closed.status.code(), Some(0), "{command}: {}", text(&closed.stderr));
    }
}
