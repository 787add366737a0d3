//! Choices that stay as they were first made: by another rank, by another process, or in an earlier run.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::warn;

/// Numbers by name, in a file of lines `name = 0123456789abcdef` that processes share. What is no such line is ignored.
pub(crate) struct Choices {
    path: Option<PathBuf>,
    known: Mutex<HashMap<String, u64>>,
}

impl Choices {
    /// Those of the file, which need not exist; without one, those of this process.
    pub fn open(path: Option<PathBuf>) -> Self {
        let text = path.as_ref().and_then(|path| std::fs::read(path).ok()).unwrap_or_default();
        Self { path, known: Mutex::new(parse(&String::from_utf8_lossy(&text)).collect()) }
    }

    /// What was chosen for `name`, if anything.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(name).copied()
    }

    /// Chooses `value` for `name`, unless somebody else was quicker with one that `is_legal`; returns what holds for
    /// all. The `note` is for people who read the file.
    pub fn settle(&self, name: &str, value: u64, note: &str, is_legal: impl Fn(u64) -> bool) -> u64 {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = known.get(name).copied().filter(|before| is_legal(*before)) {
            return before;
        }
        let shared = self.path.as_ref().map(|path| settle_in(path, name, value, note, is_legal));
        let value = match shared {
            Some(Ok(value)) => value,
            Some(Err(error)) => {
                warn(&format!("{error}; the next run chooses anew"));
                value
            }
            None => value,
        };
        known.insert(name.into(), value);
        value
    }
}

fn settle_in(path: &Path, name: &str, value: u64, note: &str, is_legal: impl Fn(u64) -> bool) -> Result<u64, String> {
    let named = |error: io::Error| format!("{}: {error}", path.display());
    let mut file = File::options().create(true).read(true).append(true).open(path).map_err(named)?;
    // Given back when the file is closed.
    file.lock().map_err(named)?;
    let mut text = Vec::new();
    file.seek(SeekFrom::Start(0)).and_then(|_| file.read_to_end(&mut text)).map_err(named)?;
    let text = String::from_utf8_lossy(&text);
    // A later line of a name takes the place of an earlier one.
    let before = parse(&text).filter(|(known, _)| known == name).last();
    if let Some((_, before)) = before.filter(|(_, before)| is_legal(*before)) {
        return Ok(before);
    }
    let gap = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    file.write_all(format!("{gap}# {note}\n{name} = {value:016x}\n").as_bytes()).map_err(named)?;
    Ok(value)
}

fn parse(text: &str) -> impl Iterator<Item = (String, u64)> {
    let line = |line: &str| {
        let (name, value) = line.rsplit_once(" = ")?;
        let value = Some(value).filter(|value| value.len() == 16)?;
        Some((name.to_string(), u64::from_str_radix(value, 16).ok()?))
    };
    text.lines().filter_map(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("choices-{}-{name}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        path
    }

    #[test]
    fn the_first_choice_holds_for_all_and_for_the_next_run() {
        let path = file("first");
        let (one, other) = (Choices::open(Some(path.clone())), Choices::open(Some(path.clone())));
        assert_eq!((one.get("a = b"), one.settle("a = b", 7, "seen = 5", |_| true)), (None, 7));
        assert_eq!(other.settle("a = b", 8, "seen = 5", |_| true), 7, "one was quicker");
        assert_eq!(other.settle("c", 9, "seen = 5", |_| true), 9);
        let later = Choices::open(Some(path.clone()));
        assert_eq!((later.get("a = b"), later.get("c"), later.get("d")), (Some(7), Some(9), None));
        assert_eq!(later.settle("c", 3, "seen = 5", |value| value != 9), 3, "9 is no choice any more");
        assert_eq!(Choices::open(Some(path.clone())).get("c"), Some(3));
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_damaged_file_is_read_as_far_as_it_can_be_and_one_that_cannot_be_written_changes_nothing() {
        let path = file("damaged");
        std::fs::write(&path, b"a = 0000000000000001\nb = 12\n\xff\xfe = x\nc = 00000000000000").unwrap();
        let choices = Choices::open(Some(path.clone()));
        assert_eq!((choices.get("a"), choices.get("b"), choices.get("c")), (Some(1), None, None));
        assert_eq!(choices.settle("c", 2, "seen = 5", |_| true), 2);
        assert_eq!(Choices::open(Some(path.clone())).get("c"), Some(2));
        std::fs::remove_file(path).unwrap();
        for path in [None, Some(PathBuf::from("/proc/no such folder/file"))] {
            let choices = Choices::open(path);
            assert_eq!(
                (choices.settle("a", 1, "seen = 5", |_| true), choices.settle("a", 2, "seen = 5", |_| true)),
                (1, 1)
            );
        }
    }

    #[test]
    fn ranks_that_choose_at_the_same_time_agree() {
        let path = file("race");
        let chosen: Vec<u64> = std::thread::scope(|scope| {
            let one = |value| {
                let path = path.clone();
                scope.spawn(move || Choices::open(Some(path)).settle("a", value, "seen = 5", |_| true))
            };
            let threads: Vec<_> = (0..8).map(one).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(chosen.iter().all(|value| *value == chosen[0]), "{chosen:?}");
        std::fs::remove_file(path).unwrap();
    }
}
