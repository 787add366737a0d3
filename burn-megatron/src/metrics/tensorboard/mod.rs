//! Scalars in TensorBoard's event files.
//!
//! The two messages that are needed are written by hand ([`message`]): the crates that write event files are unkept or
//! bring a protobuf runtime along.

mod message;
#[cfg(test)]
mod tests;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::jsonl::named;
use message::Event;

/// An event file of a run, in a folder that TensorBoard watches. A record is written whole and at once.
pub(super) struct EventFile {
    folder: PathBuf,
    file: File,
}

impl EventFile {
    /// Begins a new file in `folder`, which is created if it is missing, for a run whose last finished step is `step`.
    /// TensorBoard drops later steps of the files before it, which the run does again. The error has the folder and the
    /// cause.
    pub fn create(folder: &Path, step: u64) -> io::Result<Self> {
        let create = || {
            fs::create_dir_all(folder)?;
            let mut file = new_file(folder)?;
            begin(&mut file, now(), step)?;
            Ok(Self { folder: folder.into(), file })
        };
        create().map_err(|error| named(folder, &error))
    }

    /// Writes the values of a step. The error has the folder and the cause when the disk refuses.
    pub fn scalars(&mut self, step: u64, values: &[(String, f64)]) -> io::Result<()> {
        let event = Event::Scalars(values);
        let record = message::record(&event.encode(now(), step));
        self.file.write_all(&record).map_err(|error| named(&self.folder, &error))
    }
}

/// A file with a name of its own: two runs of a process may begin within a second.
fn new_file(folder: &Path) -> io::Result<File> {
    let (seconds, host, process) = (now() as u64, host(), std::process::id());
    let mut index = 0;
    loop {
        let path = folder.join(format!("events.out.tfevents.{seconds:010}.{host}.{process}.{index}"));
        match OpenOptions::new().create_new(true).append(true).open(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => index += 1,
            file => return file,
        }
    }
}

/// Writes what a file begins with.
fn begin(out: &mut dyn Write, time: f64, step: u64) -> io::Result<()> {
    out.write_all(&message::record(&Event::FileVersion.encode(time, 0)))?;
    out.write_all(&message::record(&Event::SessionStart.encode(time, step + 1)))
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// The machine's name, as far as the file's name may have it.
fn host() -> String {
    let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name: String = name.trim().chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-' || *c == '_').collect();
    if name.is_empty() { "localhost".into() } else { name }
}
