//! burn-train's checkpoints of a run, and what else is in their folder.

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::config::ModuleConfig;
use crate::learner::CHECKPOINT_PARTS as PARTS;
use crate::train::TrainError;

/// The configuration of the run, in the folder of its checkpoints.
const RUN: &str = "run.json";

/// What tells the data of the run from other data.
const DATA: &str = "data.sha256";

/// Sections that may differ from those of the run that is resumed.
const FREE: [&str; 6] = ["parallel", "pipeline", "checkpoint", "output", "log", "evaluation.batches"];

/// The checkpoints of a plain Burn module's run.
#[derive(Clone, Debug)]
pub struct ModuleRun {
    /// Their folder.
    pub folder: PathBuf,
    /// The configuration of the run.
    pub config: ModuleConfig,
}

impl ModuleRun {
    /// That of a folder, if it has one.
    ///
    /// # Errors
    /// If the file of the configuration is damaged.
    pub fn find(folder: impl AsRef<Path>) -> Result<Option<Self>, TrainError> {
        let (folder, path) = (folder.as_ref().to_path_buf(), folder.as_ref().join(RUN));
        let Ok(text) = std::fs::read_to_string(&path) else { return Ok(None) };
        let damaged = |error| TrainError::Module(format!("{}: {error}", path.display()));
        Ok(Some(Self { folder, config: serde_json::from_str(&text).map_err(damaged)? }))
    }

    /// The epochs with all files, oldest first.
    pub fn epochs(&self) -> Vec<usize> {
        epochs(&self.folder)
    }

    /// The file of the weights after an epoch.
    pub(super) fn weights(&self, epoch: usize) -> PathBuf {
        self.folder.join(format!("{}-{epoch}.bpk", PARTS[0]))
    }
}

fn epochs(folder: &Path) -> Vec<usize> {
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let epoch = |name: &str| name.strip_prefix("scheduler-")?.strip_suffix(".bpk")?.parse::<usize>().ok();
    let all = |epoch: &usize| PARTS.iter().all(|part| folder.join(format!("{part}-{epoch}.bpk")).exists());
    let mut found: Vec<usize> =
        files.filter_map(|file| epoch(&file.file_name().to_string_lossy())).filter(all).collect();
    found.sort_unstable();
    found
}

/// Where the run continues: the epochs that are saved, of a run with the same configuration. The first process writes the
/// configuration where there is none. Fails if the folder has another run's.
pub(super) fn begin(folder: &Path, config: &ModuleConfig, is_first: bool) -> Result<Vec<usize>, TrainError> {
    let io = |cause| TrainError::Io { path: folder.into(), cause };
    std::fs::create_dir_all(folder).map_err(io)?;
    let saved = epochs(folder);
    if config.checkpoint.resume == "never" && !saved.is_empty() {
        // Those with later steps would count for this run.
        return Err(TrainError::Module(format!(
            "checkpoint.resume = never, but {} holds checkpoints: choose another checkpoint.directory, move them away, or resume \
             from them with if-present",
            folder.display()
        )));
    }
    if let (Some(before), false) = (ModuleRun::find(folder)?, saved.is_empty()) {
        same(&before.config, config)?;
    }
    if is_first {
        write(&folder.join(RUN), &serde_json::to_string_pretty(config).expect("plain data"))?;
    }
    Ok(saved)
}

/// Writes a file that other processes of the run may read at the same time: they find the old one or the new.
fn write(path: &Path, text: &str) -> Result<(), TrainError> {
    let replace = || {
        let folder = path.parent().expect("a file in the folder of the checkpoints");
        // As other new files: runs of other users read it.
        let mut file = tempfile::Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(folder)?;
        file.write_all(text.as_bytes())?;
        file.persist(path)?;
        Ok(())
    };
    replace().map_err(|cause| TrainError::Io { path: path.into(), cause })
}

/// Refuses lists with other samples than those of the run that is resumed, by what the first process has noted of them.
pub(super) fn same_data(folder: &Path, digest: &str, resumes: bool, is_first: bool) -> Result<(), TrainError> {
    let path = folder.join(DATA);
    let noted = std::fs::read_to_string(&path).ok().filter(|_| resumes);
    if noted.is_some_and(|noted| noted != digest) {
        return Err(TrainError::Module(
            "[images]: the lists have other samples than those of the run that would be resumed; nearest legal: the same lists, or \
             another output.directory"
                .into(),
        ));
    }
    match is_first {
        true => write(&path, digest),
        false => Ok(()),
    }
}

/// Refuses a key with which the steps that were taken would have been others.
fn same(before: &ModuleConfig, now: &ModuleConfig) -> Result<(), TrainError> {
    let [before, now] = [before, now].map(|config| serde_json::to_value(config).expect("plain data"));
    // Others follow from the length of the training.
    let (first, others): (Vec<_>, Vec<_>) =
        now.as_object().into_iter().flatten().partition(|(section, _)| *section == "training");
    for (section, keys) in first.into_iter().chain(others) {
        for (key, value) in keys.as_object().into_iter().flatten() {
            let (path, old) = (format!("{section}.{key}"), &before[section][key]);
            let is_free = FREE.iter().any(|free| free == section || *free == path);
            if !is_free && old != value {
                let [value, old] =
                    [value, old].map(|value| if value.is_null() { "none".into() } else { value.to_string() });
                return Err(TrainError::Module(format!(
                    "{path} = {value}, but the run that would be resumed has {old}; nearest legal: {old}, or another \
                     output.directory"
                )));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first process of a run writes while the others read: none finds half a file.
    #[test]
    fn a_file_that_is_read_meanwhile_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(DATA);
        let text = "0123456789".repeat(10_000);
        write(&path, &text).unwrap();
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| (0..300).for_each(|_| write(&path, &text).unwrap()));
            while !writer.is_finished() {
                assert!(std::fs::read_to_string(&path).unwrap() == text, "half a file");
            }
        });
    }
}
