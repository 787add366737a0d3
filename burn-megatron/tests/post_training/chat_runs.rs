//! Runs on conversations: they learn answers, the same in every layout.

use std::fs;
use std::path::Path;

use burn_megatron::config::RunConfig;
use burn_megatron::train::RunData;

use super::chat::{golden, row, template};
use super::{log, parse, trained};

/// Questions about sums with one-word answers.
fn conversations(folder: &Path) {
    let rows: Vec<String> = (0..48)
        .map(|i| row(&format!("What is {} and {}?", i % 7, i % 5), &format!("It is {}.", i % 7 + i % 5)))
        .collect();
    fs::write(folder.join("train.jsonl"), rows.join("\n")).unwrap();
    fs::write(folder.join("valid.jsonl"), rows[..9].join("\n")).unwrap();
    template(folder, "chatml", str::to_string);
}

fn config(folder: &Path, name: &str, overrides: &[(&str, &str)]) -> RunConfig {
    let text = format!(
        "[model]\nvocab-size = 600\n[training]\nsteps = 12\nglobal-batch = 4\nseq-length = 64\ndtype = \"f64\"\n[lr]\nmax = 1e-2\n\
         [data]\ntokenizer = {:?}\n[chat]\ntrain = [{:?}]\nvalidation = [{:?}]\ntemplate = {:?}\n\
         [evaluation]\nbatches = 1\n[checkpoint]\ndirectory = \"none\"\n[output]\ndirectory = {:?}\n",
        golden().join("tokenizer/tokenizer.json"),
        folder.join("train.jsonl"),
        folder.join("valid.jsonl"),
        folder.join("chatml.jinja"),
        folder.join(name)
    );
    parse(&text, overrides)
}

/// The values of a key in the log, where it has one: the loss by step; by evaluation `token_accuracy`, the share of
/// held-out answer tokens that are the likeliest.
fn values(folder: &Path, name: &str, key: &str) -> Vec<f64> {
    log(folder, name).iter().filter_map(|line| line.get(key)?.as_f64()).collect()
}

#[test]
fn files_are_blended_by_weight() {
    let folder = tempfile::tempdir().unwrap();
    conversations(folder.path());
    let (a, b) = (folder.path().join("train.jsonl"), folder.path().join("other.jsonl"));
    let rows: String = (0..6).map(|at| row("Say no.", &format!("No, {at} times no.")) + "\n").collect();
    fs::write(&b, rows).unwrap();
    let files = format!("[{:?}, {:?}]", a.display().to_string(), b.display().to_string());
    let with = |weights: &'static str| {
        let overrides = [
            ("chat.train", files.as_str()),
            ("chat.weights", weights),
            ("data.samples", "40"),
            ("chat.packing", "none"),
        ];
        config(folder.path(), "blend", &overrides)
    };
    let data = RunData::open(&with("[1, 3]"), &mut |_| ()).unwrap();
    let alone =
        RunData::open(&config(folder.path(), "one", &[("chat.packing", "none"), ("data.samples", "48")]), &mut |_| ())
            .unwrap();
    let of_first: Vec<_> = (0..48).map(|at| alone.train.sample(at).tokens).collect();
    let taken = (0..40).filter(|at| of_first.contains(&data.train.sample(*at).tokens)).count();
    assert_eq!((data.train.len(), taken), (40, 10));
    assert!(data.notes[1].starts_with(&format!("{}: 6 samples", b.display())), "{:?}", data.notes);
    let refused = |weights| with(weights).check().unwrap_err().to_string();
    assert!(refused("[1]").contains("chat.weights has 1 numbers, chat.train 2"));
    assert!(refused("[1, 0]").contains("chat.weights must all be above 0, and one is 0"));
    assert!(refused("[1e308, 1e308]").contains("chat.weights are too large to be added"));
}

#[test]
fn a_model_learns_answers_and_every_layout_learns_the_same() {
    let folder = tempfile::tempdir().unwrap();
    conversations(folder.path());
    let one = trained(&config(folder.path(), "one", &[])).last.unwrap();
    let losses = values(folder.path(), "one", "loss");
    let (first, last) = (losses[0], losses[losses.len() - 1]);
    assert!(first > 5.0 && last < 0.6 * first, "{losses:?}");
    let right = values(folder.path(), "one", "token_accuracy");
    assert!(right[0] < 0.5 && right[right.len() - 1] > 0.5, "{right:?}");
    // What the dashboard shows, burn-train writes.
    let shown = fs::read_to_string(folder.path().join("one/valid/epoch-1/Token_accuracy.log")).unwrap();
    assert!(shown.starts_with(&format!("{},", right[0])), "{shown} {right:?}");
    // "It is N.<|im_end|>": only answers are in the loss.
    assert!(one.tokens > 9 * 4 && one.tokens < 9 * 10, "{one:?}");
    for (index, layout) in [
        &[("parallel.tp", "2"), ("parallel.sp", "true")][..],
        &[("parallel.pp", "2"), ("parallel.dp", "2"), ("parallel.zero", "1")],
        &[("parallel.cp", "2"), ("parallel.dp", "2"), ("parallel.zero", "3")],
        &[("context.dynamic", "true"), ("parallel.dp", "2"), ("context.max-tokens-per-rank", "32")],
    ]
    .into_iter()
    .enumerate()
    {
        let other = trained(&config(folder.path(), &format!("layout{index}"), layout)).last.unwrap();
        assert_eq!(other.tokens, one.tokens, "{layout:?}");
        let others = values(folder.path(), &format!("layout{index}"), "token_accuracy");
        assert!(others.iter().zip(&right).all(|(a, b)| (a - b).abs() < 1e-12), "{layout:?}: {others:?} {right:?}");
        assert!((other.loss - one.loss).abs() < 1e-10 * one.loss, "{layout:?}: {other:?} {one:?}");
    }
}

#[test]
fn long_samples_are_refused_truncated_or_dropped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    conversations(folder.path());
    let long = row("Say it.", &"word ".repeat(80));
    let path = folder.path().join("train.jsonl");
    let rows = fs::read_to_string(&path).unwrap();
    fs::write(&path, [&long, rows.as_str(), "{}"].join("\n")).unwrap();
    let open = |overrides: &[(&str, &str)]| RunData::open(&config(folder.path(), "run", overrides), &mut |_| ());
    let refused = |overrides: &[(&str, &str)]| open(overrides).err().expect("refused").to_string();
    says!(refused(&[]), "train.jsonl:1: the sample has", "chat.too-long = truncate or drop");
    says!(refused(&[("chat.too-long", "drop")]), "train.jsonl:50: no key of a conversation");
    let skip = ("chat.skip-bad-rows", "true");
    let dropped = open(&[("chat.too-long", "drop"), skip]).unwrap().notes[0].clone();
    says!(dropped, "48 samples", "1 samples dropped", "1 bad rows");
    let truncated = open(&[("chat.too-long", "truncate"), skip]).unwrap();
    assert!(truncated.notes[0].contains("49 samples") && truncated.notes[0].contains("1 samples truncated"));
    let full = (0..truncated.train.len()).map(|index| truncated.train.sample(index).counted()).max();
    assert!(full > Some(40), "the truncated answer fills a sequence: {full:?}");
}

#[test]
fn a_share_of_the_conversations_is_held_out_and_contradictions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    conversations(folder.path());
    let whole = RunData::open(
        &config(folder.path(), "a", &[("chat.packing", "none"), ("chat.validation", "[]"), ("data.split", "75,25")]),
        &mut |_| (),
    )
    .unwrap();
    assert_eq!(whole.valid.len(), 12);
    let refused = |overrides: &[(&str, &str)]| config(folder.path(), "b", overrides).check().unwrap_err().to_string();
    assert!(refused(&[("data.prefixes", "x")]).contains("data.prefixes and chat.train: only one can be the data"));
    assert!(refused(&[("data.tokenizer", "byte")]).contains("chat.train needs a tokenizer.json"));
    let small = config(folder.path(), "c", &[("model.vocab-size", "512")]);
    let said = RunData::open(&small, &mut |_| ()).err().unwrap().to_string();
    says!(said, "has 600 tokens, but model.vocab-size = 512");
}
