//! One JSON object per step in a file, for notebooks and plotting tools.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use serde::Deserialize;
use tempfile::NamedTempFile;

use crate::refusal::{Access, advice};

/// Appends lines to a file that no other run writes to. A line is written whole and at once, so a run that is killed leaves
/// only complete lines.
pub(super) struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Opens `path` for a run whose last finished step is `step`, and creates its folder if it is missing.
    ///
    /// Lines of later steps are there if a run was stopped after its last checkpoint. The run does those steps again,
    /// so they move to `PATH.undone`. What is no file, a pipe or a terminal, is only written to. The error has the path
    /// and the cause when the folder or a file cannot be made.
    pub fn open(path: &Path, step: u64) -> io::Result<Self> {
        let open = || {
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            let file = locked(append(path)?)?;
            // The lines that stay are in a new file.
            if path.is_file() && undo(path, step)? { locked(append(path)?) } else { Ok(file) }
        };
        open().map(|file| Self { path: path.into(), file }).map_err(|error| named(path, &error))
    }

    /// Kinds of the lines of a step in a log; none in what is no file.
    pub fn kinds(path: &Path, step: u64) -> io::Result<BTreeSet<String>> {
        if !path.is_file() {
            return Ok(BTreeSet::new());
        }
        let read = || BufReader::new(File::open(path)?).split(b'\n').collect::<io::Result<Vec<_>>>();
        let lines = read().map_err(|error| named(path, &error))?;
        let of_step = |line: &Vec<u8>| serde_json::from_slice(line).ok().filter(|line: &Kind| line.step == step);
        Ok(lines.iter().filter_map(of_step).map(|line| line.kind).collect())
    }

    /// Writes a line, a JSON object. The error has the path and the cause when the disk refuses.
    pub fn line(&mut self, line: &str) -> io::Result<()> {
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(|error| named(&self.path, &error))
    }
}

/// The error with the path.
pub(crate) fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}{}", path.display(), advice(Access::Write, error)))
}

/// Opens a file to write at its end. A pipe must have a reader: one that nobody reads would be waited for without end.
fn append(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.create(true).append(true).custom_flags(OFlags::NONBLOCK.bits() as i32);
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(number) if number == Errno::NXIO.raw_os_error() => {
            io::Error::new(error.kind(), "is a pipe that nobody reads; start its reader first, or name a file")
        }
        _ => error,
    })?;
    // From now on a slow reader is waited for.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    Ok(file)
}

/// The file, locked until it is closed, if it is one and its file system has locks.
fn locked(file: File) -> io::Result<File> {
    match file.metadata()?.is_file().then(|| file.try_lock()) {
        Some(Err(TryLockError::WouldBlock)) => Err(io::Error::new(
            io::ErrorKind::ResourceBusy,
            "is written by another run; wait for it to end, or give each run a log.jsonl of its own",
        )),
        _ => Ok(file),
    }
}

/// What lines of all kinds have.
#[derive(Deserialize)]
struct Position {
    step: u64,
}

/// What [`JsonLines::kinds`] reads of a line.
#[derive(Deserialize)]
struct Kind {
    kind: String,
    step: u64,
}

/// Moves the lines after `step`, and such as cannot be read, out of the way. Whether there were some. Fails where several
/// lines are no run's: the file is another one.
fn undo(path: &Path, step: u64) -> io::Result<bool> {
    let (mut of_runs, mut others) = (0, 0);
    let mut keeps = |line: &[u8]| {
        let position = serde_json::from_slice::<Position>(line).ok();
        *(if position.is_some() { &mut of_runs } else { &mut others }) += 1;
        position.is_some_and(|position| position.step <= step)
    };
    let mut undone = Vec::new();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut kept = BufWriter::new(NamedTempFile::new_in(folder)?);
    for line in BufReader::new(File::open(path)?).split(b'\n') {
        let mut line = line?;
        let keep = keeps(&line);
        line.push(b'\n');
        if keep { kept.write_all(&line)? } else { undone.extend(line) }
    }
    if of_runs == 0 && others > 1 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "is no log of a run; name another file, or a new one"));
    }
    if !undone.is_empty() {
        append(&undone_file(path))?.write_all(&undone)?;
        let kept = kept.into_inner().map_err(io::IntoInnerError::into_error)?;
        fs::set_permissions(kept.path(), fs::metadata(path)?.permissions())?;
        kept.persist(path)?;
    }
    Ok(!undone.is_empty())
}

fn undone_file(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".undone");
    name.into()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn steps(path: &Path) -> Vec<u64> {
        let text = fs::read_to_string(path).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["step"].as_u64().unwrap()).collect()
    }

    #[test]
    fn a_resumed_run_takes_back_the_steps_it_does_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/steps.jsonl");
        let mut log = JsonLines::open(&path, 0).unwrap();
        for step in 1..=5 {
            log.line(&json!({ "kind": "train", "step": step, "loss": 0.5 }).to_string()).unwrap();
        }
        drop(log);
        // A machine that lost power.
        append(&path).unwrap().write_all(b"{\"kind\":\"tra").unwrap();
        let mut log = JsonLines::open(&path, 3).unwrap();
        log.line(&json!({ "kind": "train", "step": 4 }).to_string()).unwrap();
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        let undone = fs::read_to_string(undone_file(&path)).unwrap();
        let expected =
            [json!({ "kind": "train", "step": 4, "loss": 0.5 }), json!({ "kind": "train", "step": 5, "loss": 0.5 })];
        let lines: Vec<&str> = undone.lines().collect();
        assert_eq!(lines[2], "{\"kind\":\"tra");
        assert_eq!(lines[..2].iter().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>(), expected);

        drop(log);
        // Nothing to take back: the file stays as it is. A new run keeps the old one's lines aside.
        drop(JsonLines::open(&path, 9).unwrap());
        assert_eq!(steps(&path), [1, 2, 3, 4]);
        drop(JsonLines::open(&path, 0).unwrap());
        assert_eq!(steps(&path), [] as [u64; 0]);
        assert_eq!(fs::read_to_string(undone_file(&path)).unwrap().lines().count(), 7);
    }

    #[test]
    fn a_log_that_is_no_file_is_written_and_never_read() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        says!(JsonLines::open(&pipe, 0).err().unwrap(), "pipe: is a pipe that nobody reads");
        // Opened to read and write, so that it does not wait for the writer.
        let reader = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
        let mut log = JsonLines::open(&pipe, 0).unwrap();
        log.line(&json!({ "kind": "train", "step": 1 }).to_string()).unwrap();
        let mut line = String::new();
        BufReader::new(reader).read_line(&mut line).unwrap();
        assert_eq!(line, "{\"kind\":\"train\",\"step\":1}\n");
        // It never ends when it is read, and is full when it is written.
        let error =
            JsonLines::open(Path::new("/dev/full"), 0).unwrap().line(&json!({ "step": 1 }).to_string()).unwrap_err();
        assert!(error.to_string().starts_with("/dev/full: "), "{error}");
    }

    #[test]
    fn a_file_of_something_else_stays_as_it_is() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "{\"text\": \"one\"}\n{\"text\": \"two\"}\n";
        fs::write(file.path(), text).unwrap();
        says!(JsonLines::open(file.path(), 0).err().unwrap(), "is no log of a run");
        assert_eq!(fs::read_to_string(file.path()).unwrap(), text);
    }

    #[test]
    fn two_runs_do_not_write_to_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("steps.jsonl");
        let mut log = JsonLines::open(&path, 0).unwrap();
        log.line(&json!({ "kind": "train", "step": 1 }).to_string()).unwrap();
        says!(JsonLines::open(&path, 0).err().unwrap(), "steps.jsonl: is written by another run");
        assert_eq!(steps(&path), [1]);
        drop(log);
        // Lines that are taken back leave a new file behind, which is locked as well.
        let again = JsonLines::open(&path, 0).unwrap();
        says!(JsonLines::open(&path, 0).err().unwrap(), "is written by another run");
        drop(again);
    }

    #[test]
    fn an_impossible_folder_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        says!(JsonLines::open(&file.path().join("run/steps.jsonl"), 0).err().unwrap(), "steps.jsonl");
    }
}
