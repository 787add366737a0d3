use super::*;

fn read(lines: &str) -> Result<Task, String> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("arc.easy.jsonl");
    std::fs::write(&path, lines).unwrap();
    read_task(&path, usize::MAX).map_err(|error| error.to_string().replace(&path.display().to_string(), "arc"))
}

#[test]
fn the_kind_follows_from_the_keys() {
    let choice = r#"{"context": "2+2=", "continuations": [" 3", " 4"], "answer": 1}"#;
    let other = r#"{"context": "2+2=", "continuations": [" 3", " 4"], "answer": ["4", 0]}"#;
    let task = read(&format!("{choice}\n\n{other}\n")).unwrap();
    assert_eq!((task.name.as_str(), task.kind, task.questions.len()), ("arc", Kind::MultipleChoice, 2));
    assert_eq!(task.questions[1].0, 3, "the line counts, also empty ones");
    let answers = |at: usize| match &task.questions[at].1 {
        Question::MultipleChoice { answers, .. } => answers.clone(),
        other => panic!("{other:?}"),
    };
    assert_eq!([answers(0), answers(1)], [vec![1], vec![1, 0]]);
    assert_eq!(read(r#"{"context": "", "continuation": " a"}"#).unwrap().kind, Kind::LogLikelihood);
    let task = read(r#"{"context": "Q", "target": "A", "until": ["\n"], "max_new_tokens": 3}"#).unwrap();
    assert_eq!(task.kind, Kind::Generate);
}

#[test]
fn bad_rows_are_named() {
    for (row, words) in [
        ("[1]", "arc:1: none of continuations"),
        (r#"{"context": "x"}"#, "arc:1: none of continuations, continuation, target among context"),
        (r#"{"continuation": " a"}"#, "context: missing"),
        (r#"{"context": "x", "continuation": " "}"#, "continuation: an empty text"),
        (r#"{"context": "x", "continuation": "a", "target": "b"}"#, "`continuation` and `target`"),
        (r#"{"context": "x", "continuations": ["a"], "answer": 1}"#, "legal: 0 to 0"),
        (r#"{"context": "x", "continuations": ["a"]}"#, "answer: missing"),
        (r#"{"context": "x", "continuations": ["a"], "answer": "b"}"#, "`b` is none of the continuations"),
        (r#"{"context": "x", "continuations": [1], "answer": 0}"#, "continuations[0]: a text, this is a number"),
        (r#"{"context": "x", "target": [], "until": "."}"#, "target: an empty list"),
        (r#"{"context": "x", "target": "y", "max_new_tokens": 0}"#, "nearest legal: 1"),
        ("{", "arc:1: not JSON"),
        ("", "has no question"),
    ] {
        let error = read(row).unwrap_err();
        assert!(error.contains(words) || (row == "[1]" && error.contains("a row is a JSON object")), "{row}: {error}");
    }
    let two = "{\"context\": \"\", \"continuation\": \" a\"}\n{\"context\": \"\", \"target\": \"a\"}";
    assert!(read(two).unwrap_err().contains("arc:2: generate_until, but line 1 is loglikelihood"));
}

/// Some editors begin a file with one.
#[test]
fn a_byte_order_mark_is_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("book.txt");
    std::fs::write(&path, "\u{feff}One").unwrap();
    let task = read_documents(&path, 1).unwrap();
    assert_eq!(task.questions, [(1, Question::Document { text: "One".into() })]);
}
