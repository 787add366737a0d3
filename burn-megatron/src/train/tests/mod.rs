mod averages;
mod controls;
mod folder;
mod groups;
mod ids;
mod splits;
mod teachers;
mod threads;

use std::path::Path;

use backend_dist::mesh::Mesh;
use backend_dist::process::ProcessWorld;
use burn::tensor::Device;
use models::{ModelConfig, WeightSource};

use super::*;
use crate::checkpoint::Checkpoint;
use crate::config::RunConfig;
use crate::hf::{HfFolder, companions_of};

/// A folder with a text.
fn book() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let text: String = (0..60).map(|i| format!("Paragraph {i} says that {i} times {i} is {}.\n\n", i * i)).collect();
    std::fs::write(folder.path().join("book.txt"), text).unwrap();
    folder
}

fn config(folder: &Path, overrides: &[(&str, &str)]) -> RunConfig {
    let text = format!(
        "[training]\nsteps = 6\nmicro-batch = 2\nglobal-batch = 4\nseq-length = 16\n[lr]\nmax = 1e-2\n\
         [data]\ntext = [{:?}]\ntokenizer = \"byte\"\nsplit = \"80,10,10\"\n[evaluation]\nbatches = 1\n[output]\ndirectory = {:?}\n",
        folder.join("book.txt"),
        folder.join("run")
    );
    let overrides: Vec<(String, String)> =
        overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    RunConfig::parse("run.toml", &text, &overrides).unwrap_or_else(|errors| panic!("{errors}"))
}

fn run(config: &RunConfig) -> Result<TrainReport, TrainError> {
    train(&Plan::new(config, &[])?, vec![Device::flex()], &mut |_| ())
}

fn losses(folder: &Path) -> Vec<String> {
    let log = std::fs::read_to_string(folder.join("run/steps.jsonl")).unwrap();
    log.lines().filter_map(|line| line.split("\"loss\":").nth(1)?.split(',').next().map(String::from)).collect()
}

#[test]
fn a_run_learns_and_is_the_same_in_another_layout() {
    let folder = book();
    let one = run(&config(folder.path(), &[("training.dtype", "f64")])).unwrap().last.unwrap();
    assert!(one.loss < 5.0 && one.tokens > 0, "{one:?}: less than ln 257 after six steps");
    let count = losses(folder.path()).len();
    assert!(count >= 6, "{count} losses");

    let other = book();
    let layout = [("training.dtype", "f64"), ("parallel.tp", "2"), ("parallel.dp", "2"), ("parallel.sp", "true")];
    let four = run(&config(other.path(), &layout)).unwrap().last.unwrap();
    assert!((one.loss - four.loss).abs() < 1e-10 * one.loss, "{one:?} {four:?}");
    assert_eq!(one.tokens, four.tokens);
}

#[test]
fn the_last_loss_is_over_every_sequence_once_in_every_layout() {
    let folder = book();
    let last = |micro: &str, dp: &str| {
        let (micro, dp) = (("training.micro-batch", micro), ("parallel.dp", dp));
        let rest = [("training.dtype", "f64"), ("training.steps", "1"), ("checkpoint.directory", "none")];
        let config = config(folder.path(), &[&rest[..], &[micro, dp, ("training.global-batch", "8")]].concat());
        let sequences = RunData::open(&config, &mut |_| ()).unwrap().last.unwrap().len();
        (sequences, run(&config).unwrap().last.unwrap())
    };
    let (sequences, one) = last("1", "1");
    assert_eq!(one.tokens, sequences as u64 * 16);
    assert_ne!(sequences % 8, 0, "the last batch of eight must not be full");
    for (micro, dp) in [("8", "1"), ("4", "2"), ("1", "4")] {
        let (_, other) = last(micro, dp);
        assert_eq!(other.tokens, one.tokens, "{micro} x {dp}");
        assert!((other.loss - one.loss).abs() < 1e-10 * one.loss, "{micro} x {dp}: {other:?} {one:?}");
    }
}

#[test]
fn prepared_prefixes_are_the_same_data() {
    let folder = book();
    let mut nowhere = |_| ();
    let written = RunData::open(&config(folder.path(), &[]), &mut nowhere).unwrap();
    let prefix = folder.path().join("run/data/text_text_document").display().to_string();
    let tokenizer = written.tokenizer.clone().unwrap().display().to_string();
    let overrides = [("data.prefixes", prefix.as_str()), ("data.text", "[]"), ("data.tokenizer", &tokenizer)];
    let overrides = [&overrides[..], &[("model.vocab-size", "257"), ("data.eod-mask-loss", "true")]].concat();
    let read = RunData::open(&config(folder.path(), &overrides), &mut nowhere).unwrap();
    assert_eq!(read.train.len(), written.train.len());
    let masked = (0..read.train.len())
        .any(|sequence| read.train.sample(sequence).loss_mask.is_some_and(|mask| mask.contains(&false)));
    assert!(masked, "ends of documents are known from the tokenizer");
    assert!(
        (0..read.train.len())
            .all(|sequence| read.train.sample(sequence).tokens == written.train.sample(sequence).tokens)
    );
    assert!(read.last.unwrap().len() < read.valid.len().max(2) * 2);
}

#[test]
fn what_does_not_fit_is_refused_before_the_first_step() {
    let folder = book();
    let refuse = |overrides: &[(&str, &str)]| run(&config(folder.path(), overrides)).unwrap_err().to_string();
    let said = refuse(&[("model.vocab-size", "256")]);
    assert!(said.ends_with("has 257 tokens, but model.vocab-size = 256; nearest legal: 257"), "{said}");
    assert!(refuse(&[("training.seq-length", "4000")]).contains("no validation sequence of 4000 + 1 tokens"));
    let file = folder.path().join("book.txt").display().to_string();
    let said = refuse(&[("data.text", "none.txt"), ("data.tokenizer", "no.json"), ("output.directory", &file)]);
    assert!(said.starts_with("4 problems") && said.contains("output.directory = "), "{said}");
    says!(said, "data.text: none.txt: ", "data.tokenizer: there is no file no.json");
    for key in ["data.cache", "log.tensorboard", "log.wandb", "log.mlflow"] {
        says!(refuse(&[(key, &file)]), &format!("{key} = {file}: {file} is a file"));
    }
    let named = folder.path().display().to_string();
    says!(refuse(&[("log.jsonl", &named)]), &format!("log.jsonl = {named} is a folder; name a file"));
    says!(refuse(&[("log.trace", &format!("{file}/trace.json"))]), &format!("{file} is a file"));
    says!(refuse(&[("data.tokenizer", &named)]), "is a folder; name its tokenizer.json");
}

/// Rotary positions have no end, but `generate` and `serve` keep to those that the model was made for.
#[test]
fn a_sequence_longer_than_the_models_positions_is_said() {
    let folder = book();
    let said = |most: &str| {
        Plan::new(&config(folder.path(), &[("model.max-position-embeddings", most)]), &[]).unwrap().to_string()
    };
    says!(
        said("8"),
        "warning      training.seq-length = 16 is more than the model is made for: model.max-position-embeddings = 8"
    );
    assert!(!said("16").contains("warning"));
}

/// A folder's vocabulary cannot grow, so that is not what is advised.
#[test]
fn a_tokenizer_that_is_too_large_for_a_folder_gets_advice_that_can_be_followed() {
    let folder = book();
    let hf = folder.path().join("hf");
    std::fs::create_dir(&hf).unwrap();
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf/llama3/config.json");
    std::fs::copy(golden, hf.join("config.json")).unwrap();
    let hf_text = hf.display().to_string();
    let said = |overrides: &[(&str, &str)], tokenizer: &Path| {
        let overrides = [&[("model.hf", hf_text.as_str())][..], overrides].concat();
        let config = config(folder.path(), &overrides);
        assert!(run_data::fits(&config, 256, None).is_ok());
        run_data::fits(&config, 300, Some(tokenizer)).unwrap_err().to_string()
    };
    let other = folder.path().join("other.json");
    std::fs::write(&other, "{}").unwrap();
    let bpe = said(&[("data.tokenizer", "bpe")], &other);
    says!(bpe, "has 300 tokens, but model.vocab-size = 256; ", "name the files in data.prefixes");
    assert!(!bpe.contains("bpe-size"), "a BPE has 257 at least: {bpe}");
    let file = other.display().to_string();
    let with_file = [("data.tokenizer", file.as_str())];
    assert!(said(&with_file, &other).contains("name the files in data.prefixes without data.tokenizer"));
    let prefixes = [with_file[0], ("data.prefixes", "a"), ("data.text", "[]")];
    assert!(said(&prefixes, &other).contains("leave data.tokenizer out (none)"));
    // As soon as the folder has its own.
    let own = hf.join("tokenizer.json");
    std::fs::write(&own, "{}").unwrap();
    assert!(said(&with_file, &other).ends_with(&format!("take its own, data.tokenizer = {}", own.display())));
    assert!(!said(&[], &own).contains("take its own"));
}

#[test]
fn processes_that_read_other_data_are_refused() {
    let folder = book();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let process = |process: usize| {
        let seed = ["1", "2"][process];
        let config = config(folder.path(), &[("parallel.dp", "2"), ("data.seed", seed)]);
        let world = ProcessWorld::on_one_host(process, 2, port);
        let processes = Processes::join(&world, &Mesh::new(config.parallel.clone()).unwrap(), &[]).unwrap();
        let plan = Plan::new(&config, &[]).unwrap();
        train_among(&plan, Some(&processes), vec![Device::flex()], &mut |_| ()).unwrap_err().to_string()
    };
    let said = std::thread::scope(|scope| {
        let other = scope.spawn(|| process(1));
        [process(0), other.join().unwrap()]
    });
    assert!(
        said[0].starts_with("process 1 has ") && said[0].contains(" training sequences with the hash "),
        "{}",
        said[0]
    );
    assert_eq!(said[0], said[1]);
}

#[test]
fn tokens_that_the_model_lacks_are_found_before_the_first_step() {
    let folder = book();
    RunData::open(&config(folder.path(), &[]), &mut |_| ()).unwrap();
    let prefix = folder.path().join("run/data/text_text_document").display().to_string();
    let overrides = [
        ("data.prefixes", prefix.as_str()),
        ("data.text", "[]"),
        ("data.tokenizer", "none"),
        ("model.vocab-size", "256"),
    ];
    assert!(matches!(run(&config(folder.path(), &overrides)), Err(TrainError::Token { id: 256, .. })));
}

#[test]
fn a_plan_tells_sizes_and_writes_nothing() {
    let folder = book();
    let plan = Plan::new(&config(folder.path(), &[("parallel.tp", "2")]), &[]).unwrap();
    let said = plan.to_string();
    says!(said, "TP2 on 2 ranks", "64 tokens", "6 steps, 384 tokens", "bytes of text", "every 1 step, on 4 sequences");
    assert!(!folder.path().join("run").exists());
}

#[test]
fn a_stopped_run_resumes_in_another_layout() {
    let (whole, parts) = (book(), book());
    let f64 = ("training.dtype", "f64");
    let expected = run(&config(whole.path(), &[f64])).unwrap().last.unwrap();
    // Three of six steps: what follows from the number of steps stays that of the whole run.
    let stop = [f64, ("training.steps", "3"), ("lr.decay", "6"), ("data.samples", "24"), ("checkpoint.every", "none")];
    run(&config(parts.path(), &stop)).unwrap();
    let rest = config(parts.path(), &[f64, ("parallel.tp", "2"), ("parallel.dp", "2")]);
    let plan = Plan::new(&rest, &[]).unwrap();
    assert_eq!(plan.start.as_ref().map(|start| start.step), Some(3));
    assert!(plan.to_string().contains("resumes      after step 3 from "), "{plan}");
    let last = run(&rest).unwrap().last.unwrap();
    assert!((last.loss - expected.loss).abs() < 1e-10 * expected.loss, "{last:?} {expected:?}");

    // The run is finished: once more does nothing, other data or a new start is refused.
    assert_eq!(run(&rest).unwrap().last, Some(last));
    let refuse = |overrides: &[(&str, &str)]| {
        Plan::new(&config(parts.path(), &[&[f64][..], overrides].concat()), &[]).unwrap_err().to_string()
    };
    says!(refuse(&[("data.seed", "9")]), "data.seed was 1234 when", "is what this run would resume from");
    assert!(refuse(&[("checkpoint.resume", "never")]).contains("holds checkpoints up to step 6"));
    let fewer = [("training.steps", "2"), ("lr.decay", "6"), ("data.samples", "24")];
    assert!(refuse(&fewer).contains("has done 6 already"));
}

#[test]
fn changes_that_are_allowed_are_made() {
    let folder = book();
    run(&config(folder.path(), &[])).unwrap();
    let longer = config(folder.path(), &[("training.steps", "8"), ("lr.max", "1e-3")]);
    let refused = Plan::new(&longer, &[]).unwrap_err().to_string();
    says!(refused, "4 problems", "is what this run would resume from");
    let plan = Plan::new(&longer, &["lr".into(), "data.samples".into()]).unwrap();
    train(&plan, vec![Device::flex()], &mut |_| ()).unwrap();
    assert!(folder.path().join("run/checkpoints/step_00000008").exists());
}

/// Of a Gemma 3 with images the language model is trained, and the plan says what is left out.
#[test]
fn a_plan_says_what_it_does_not_read() {
    let folder = book();
    let hf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf/gemma3_images").display().to_string();
    let config = config(folder.path(), &[("model.hf", &hf), ("data.tokenizer", "char"), ("training.steps", "1")]);
    let plan = Plan::new(&config, &[]).unwrap();
    says!(plan, "left out     ", "23 tensors for images (vision_tower, multi_modal_projector) are not");
    train(&plan, vec![Device::flex()], &mut |_| ()).unwrap();
}

#[test]
fn a_hugging_face_folder_gives_sizes_and_first_weights() {
    let folder = book();
    let hf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/hf/qwen3");
    // At a rate of 0 the weights stay what they were.
    let hf = hf.display().to_string();
    let still = [
        ("model.hf", hf.as_str()),
        ("data.tokenizer", "char"),
        ("lr.max", "0"),
        ("parallel.tp", "2"),
        ("training.steps", "1"),
    ];
    let still_config = config(folder.path(), &still);
    let plan = Plan::new(&still_config, &[]).unwrap();
    assert!(plan.to_string().contains("parameters, weights of "), "{plan}");
    train(&plan, vec![Device::flex()], &mut |_| ()).unwrap();

    let (theirs, ours) =
        (HfFolder::open(&hf).unwrap(), Checkpoint::open(folder.path().join("run/checkpoints")).unwrap());
    assert_eq!(companions_of(&ours).unwrap(), *theirs.companions(), "an export writes them again");
    let mut compared = 0;
    for (name, tensor) in still_config.model.config.hf_names().iter() {
        let shape = tensor.our_shape();
        let whole: Vec<_> = shape.iter().map(|size| 0..*size).collect();
        let read = |source: &dyn WeightSource| source.read(name, &shape, &whole).unwrap();
        assert!(read(&theirs) == read(&ours), "{name}");
        compared += 1;
    }
    assert!(compared > 10);

    // Without the folder the run resumes as well, and keeps what came with the model.
    let mut on = config(folder.path(), &[&still[..], &[("training.steps", "2")]].concat());
    on.model.hf = None;
    let plan = Plan::new(&on, &["lr".into(), "data.samples".into()]).unwrap();
    train(&plan, vec![Device::flex()], &mut |_| ()).unwrap();
    let second = Checkpoint::open(folder.path().join("run/checkpoints")).unwrap();
    assert_eq!((second.state().step, companions_of(&second).unwrap()), (2, theirs.companions().clone()));

    let wider = [&still[..], &[("model.intermediate-size", "512")]].concat();
    says!(Plan::new(&config(folder.path(), &wider), &["model".into()]).unwrap_err(), "mlp.", "leave its sizes");
}
