//! Validation and test data of their own.

use super::*;

/// Folder with three texts of 60, 20 and 10 paragraphs.
fn books() -> tempfile::TempDir {
    let folder = book();
    for (name, numbers) in [("watched.txt", 100..120), ("judged.txt", 200..210)] {
        let text: String = numbers.map(|i| format!("Nobody has said that {i} times {i} is {}.\n\n", i * i)).collect();
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

/// Losses of all evaluations, as they were written.
fn evaluations(folder: &Path) -> Vec<String> {
    let log = std::fs::read_to_string(folder.join("run/steps.jsonl")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.filter(|line| line["kind"] != "train").map(|line| line["loss"].to_string()).collect()
}

/// A run on `book.txt` with the other two texts for validation and test.
fn apart(folder: &Path, overrides: &[(&str, &str)]) -> RunConfig {
    let text = format!(
        "[training]\nsteps = 6\nmicro-batch = 2\nglobal-batch = 4\nseq-length = 16\n[lr]\nmax = 1e-2\n\
         [data]\ntext = {:?}\nvalidation = {:?}\ntest = {:?}\ntokenizer = \"byte\"\n[evaluation]\nbatches = 2\n[output]\ndirectory = {:?}\n",
        folder.join("book.txt"),
        folder.join("watched.txt"),
        folder.join("judged.txt"),
        folder.join("run")
    );
    let overrides: Vec<_> = overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
    RunConfig::parse("run.toml", &text, &overrides).unwrap_or_else(|errors| panic!("{errors}"))
}

/// The same as a run whose one data set consists of the three texts and is divided between them, also across a resume, and
/// as one of files that are tokenized already.
#[test]
fn files_of_their_own_are_read_whole() {
    let (divided, named) = (books(), books());
    let all = ["book.txt", "watched.txt", "judged.txt"].map(|name| divided.path().join(name).display().to_string());
    let keys = [("data.split", "60,20,10"), ("data.text-documents", "paragraph"), ("evaluation.batches", "2")];
    let one = config(divided.path(), &[&[("data.text", all.join(",").as_str())][..], &keys].concat());
    let expected = run(&one).unwrap().last.unwrap();

    let stop = [("training.steps", "3"), ("lr.decay", "6"), ("data.samples", "24"), ("evaluation.every", "1")];
    run(&apart(named.path(), &stop)).unwrap();
    let last = run(&apart(named.path(), &[])).unwrap().last.unwrap();
    assert_eq!((last.loss, last.tokens), (expected.loss, expected.tokens));
    assert_eq!(losses(named.path()).len(), losses(divided.path()).len());
    let watched = evaluations(divided.path());
    assert!(watched.len() >= 6 && evaluations(named.path()).ends_with(&watched[watched.len() - 3..]));

    let tokens = |name: &str| named.path().join(format!("run/data/{name}_text_document")).display().to_string();
    let output = named.path().join("again").display().to_string();
    let prepared = [
        ("data.prefixes", tokens("text")),
        ("data.text", "[]".into()),
        ("data.validation", tokens("validation")),
        ("data.validation-weights", "[3]".into()),
        ("data.test", tokens("test")),
        ("data.tokenizer", "none".into()),
        ("model.vocab-size", "257".into()),
        ("output.directory", output),
    ];
    let prepared: Vec<(&str, &str)> = prepared.iter().map(|(key, value)| (*key, value.as_str())).collect();
    assert_eq!(run(&apart(named.path(), &prepared)).unwrap().last.unwrap().loss, expected.loss);
    let changed = Plan::new(&apart(named.path(), &[("data.validation", &all[2])]), &[]).unwrap_err().to_string();
    says!(changed, "data.validation was [", "--allow-change data.validation");
}

#[test]
fn wrong_files_of_their_own_are_refused_before_anything_is_read() {
    let folder = books();
    let refused = |overrides: &[(&str, &str)]| {
        Plan::new(&apart(folder.path(), overrides), &[]).map(|plan| panic!("{plan}")).unwrap_err().to_string()
    };
    let missing = refused(&[("data.validation", "no.txt"), ("data.test", "none.txt")]);
    says!(missing, "data.validation: no.txt: ", "data.test: none.txt: ");
    let split = refused(&[("data.split", "90,5,5")]);
    says!(split, "data.split = 90,5,5 divides the files of training, and data.validation names others", "1,0,0");
    says!(refused(&[("data.validation", "[]")]), "data.test leaves no validation data for evaluation.batches = 2");
    says!(refused(&[("data.test-weights", "[1]")]), "data.test-weights is for prefixes");
    let prefixes = [("data.text", "[]"), ("data.prefixes", "a"), ("data.tokenizer", "none")];
    let weights = [&prefixes[..], &[("data.validation-weights", "[1, 2]")]].concat();
    says!(refused(&weights), "data.validation-weights has 2 numbers, data.validation 1");
    says!(refused(&prefixes), "data.validation: ", "watched.txt");
    let chat = refused(&[("data.text", "[]"), ("chat.train", "a.jsonl"), ("data.tokenizer", "t.json")]);
    says!(chat, "data.validation is for data.prefixes and data.text, which are not given");
    let plan = Plan::new(&apart(folder.path(), &[("data.split", "1,0,0")]), &[]).unwrap().to_string();
    says!(plan, "bytes of text", "bytes of validation text", "bytes of test text");
    // A test that is shorter than one sequence is not replaced by validation data.
    std::fs::write(folder.path().join("judged.txt"), "short\n").unwrap();
    says!(run(&apart(folder.path(), &[])).err().unwrap(), "there is no test sequence of 16 + 1 tokens");
}
