//! The files and folders that a run names, looked at before anything is read.

use std::collections::BTreeSet;
use std::path::Path;

use indicatif::HumanCount;

use crate::config::{Problem, RunConfig};
use crate::data::indexed::IndexedDataset;
use crate::data::{Split, SplitRatios, read_text};

/// A file of text or conversations, in a line; the error says why it is none.
pub(super) fn source_file(key: &str, file: &Path) -> Result<String, String> {
    let about = std::fs::metadata(file).map_err(|error| format!("{key}: {}: {error}", file.display()))?;
    let size = about.len();
    if about.is_dir() {
        return Err(format!("{key}: {} is a folder; name its .txt, .jsonl or .parquet files", file.display()));
    }
    if about.is_file() && size == 0 {
        return Err(format!("{key}: {} is empty", file.display()));
    }
    let what = match key {
        "data.text" => "text",
        "data.validation" => "validation text",
        "data.test" => "test text",
        "evaluation.tasks" => "tasks",
        "grpo.train" => "prompts",
        "distill.logits" => "a teacher's likeliest tokens",
        "preference.train" | "preference.validation" => "pairs",
        _ => "conversations",
    };
    Ok(format!("{}: {} bytes of {what}", file.display(), HumanCount(size)))
}

/// A pair of files that `key` names; those of `data.prefixes` must have something for every split.
pub(super) fn indexed(config: &RunConfig, key: &str, prefix: &Path) -> Result<String, String> {
    let data = IndexedDataset::open(prefix).map_err(|error| format!("{key}: {error}"))?;
    let ranges = config.data.split.ranges(data.num_sequences());
    let used = [true, config.evaluation.batches > 0, false];
    for (part, range) in Split::ALL.iter().zip(&ranges) {
        let empty = range.as_ref().is_some_and(|range| range.is_empty());
        if used[*part as usize] && empty {
            let (split, sequences) = (&config.data.split, data.num_sequences());
            let name = part.name();
            let of = prefix.display();
            return Err(match key {
                "data.prefixes" => {
                    let nearest = with_validation(split, sequences).filter(|_| *part == Split::Valid);
                    let nearest = nearest.map_or(String::new(), |split| format!("; nearest legal: {split}"));
                    format!("data.split = {split} leaves {name} none of the {sequences} sequences of {of}{nearest}")
                }
                _ => format!("{key}: {of} has no sequence"),
            });
        }
    }
    let (tokens, documents) = (HumanCount(data.num_tokens() as u64), HumanCount(data.num_documents() as u64));
    let part = key
        .strip_prefix("data.")
        .filter(|part| *part != "prefixes")
        .map_or(String::new(), |part| format!(" for {part}"));
    Ok(format!("{}: {tokens} tokens in {documents} documents{part}", prefix.display()))
}

/// A split in percent whose validation has the smallest share that gives it one of so many sequences.
fn with_validation(split: &SplitRatios, sequences: usize) -> Option<String> {
    let test = (100.0 * split.shares()[2]).round() as usize;
    let of_test = if test > 0 { format!(",{test}") } else { String::new() };
    (1..100usize.saturating_sub(test)).find_map(|valid| {
        let split = format!("{},{valid}{of_test}", 100 - test - valid);
        let ranges = split.parse::<SplitRatios>().ok()?.ranges(sequences);
        let has_some = ranges[..2].iter().all(|range| range.as_ref().is_some_and(|range| !range.is_empty()));
        has_some.then_some(split)
    })
}

/// Bytes of text whose characters are counted before a run starts.
const COUNTED: u64 = 1 << 26;

/// Entries of a tokenizer that is made from the text, with the end of a document, as far as they are known without making it:
/// the bytes, and the characters of small `.txt` files.
pub(super) fn made_from_text(config: &RunConfig) -> Option<usize> {
    let files = &config.data.text;
    let bytes = || files.iter().map(|file| Some(file.metadata().ok()?.len())).sum::<Option<u64>>();
    match config.data.tokenizer.as_deref()? {
        "byte" => Some(257),
        "char" if files.iter().all(|file| file.extension().is_some_and(|end| end == "txt")) && bytes()? <= COUNTED => {
            let texts = files.iter().map(|file| read_text(file)).collect::<Result<Vec<_>, _>>().ok()?;
            let characters: BTreeSet<char> = texts.iter().flat_map(|text| text.chars()).collect();
            Some(characters.len() + 1)
        }
        _ => None,
    }
}

/// What is wrong with the name of a tokenizer.
pub(super) fn missing_tokenizer(config: &RunConfig) -> Option<Problem> {
    let path = config.data.tokenizer.as_deref().filter(|name| !["char", "byte", "bpe"].contains(name))?;
    match Path::new(path) {
        file if file.is_file() => None,
        folder if folder.is_dir() => {
            Some(Problem::new(format!("data.tokenizer = {path} is a folder; name its tokenizer.json")))
        }
        _ => Some(Problem::new(format!("data.tokenizer: there is no file {path}; char, byte and bpe need none"))),
    }
}

/// Whether there is a file where a folder is needed.
pub(super) fn not_a_folder(key: &str, folder: &Path) -> Option<Problem> {
    let there = folder.ancestors().find(|ancestor| ancestor.exists())?;
    (!there.is_dir()).then(|| Problem::new(format!("{key} = {}: {} is a file", folder.display(), there.display())))
}

/// Whether there is a folder where a file is needed, or a file where its folder is.
pub(super) fn not_a_file(key: &str, file: &Path) -> Option<Problem> {
    match file.is_dir() {
        true => Some(Problem::new(format!("{key} = {} is a folder; name a file", file.display()))),
        false => not_a_folder(key, file.parent()?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_share_that_leaves_validation_a_sequence_is_named() {
        let nearest = |split: &str, sequences| with_validation(&split.parse().unwrap(), sequences);
        assert_eq!(nearest("99,1", 42).as_deref(), Some("98,2"));
        assert_eq!(nearest("98,1,1", 12).as_deref(), Some("95,4,1"));
        assert_eq!(nearest("99,1", 1), None);
    }
}
