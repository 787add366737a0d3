//! Names in the folder of a run's checkpoints.

use std::path::{Path, PathBuf};

/// The checkpoint to resume from, by name.
pub(super) const LATEST: &str = "latest";
/// The new `latest` before it takes the old one's place.
pub(super) const NEW_LATEST: &str = ".latest.tmp";
/// Held by the run that saves here.
pub(super) const LOCK: &str = ".lock";
/// In a folder of checkpoints: which run it is, if its checkpoints have a storage.
pub(super) const OWN: &str = ".owner";
/// The new one before it takes the old one's place.
pub(super) const NEW_OWN: &str = ".owner.tmp";
/// In a storage: the run that it belongs to.
pub(super) const OWNER: &str = "owner";
/// Held by the run that writes to its output folder.
pub(super) const RUN_LOCK: &str = ".run.lock";
/// What a checkpoint contains.
pub(super) const MANIFEST: &str = "manifest.json";
/// Hashes of all other files of a checkpoint, as `sha256sum -c` reads them.
pub(super) const SUMS: &str = "SHA256SUMS";
/// The tokenizer of the run.
pub(super) const TOKENIZER: &str = "tokenizer.json";

/// A folder in a folder of checkpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Folder {
    /// A complete checkpoint.
    Step(u64),
    /// A complete checkpoint on its way out, because its step has been saved again; the only one of its step until the
    /// new one has its name.
    Replaced(u64),
    /// A checkpoint that is being written.
    Partial(u64),
    /// A checkpoint that is being deleted.
    Deleted(u64),
    /// The trial of a save at the start of a run.
    Rehearsal,
}

impl Folder {
    /// The name.
    pub fn name(self) -> String {
        match self {
            Self::Step(step) => step_name(step),
            Self::Replaced(step) => format!(".{}.replaced", step_name(step)),
            Self::Partial(step) => format!(".{}.tmp", step_name(step)),
            Self::Deleted(step) => format!(".{}.deleted", step_name(step)),
            Self::Rehearsal => ".rehearsal.tmp".into(),
        }
    }

    /// The path under `root`.
    pub fn path(self, root: &Path) -> PathBuf {
        root.join(self.name())
    }

    /// What a name means; `None` for anything that is not ours.
    pub fn parse(name: &str) -> Option<Self> {
        let step: String = name.chars().filter(char::is_ascii_digit).collect();
        let candidates: &[fn(u64) -> Self] = &[Self::Step, Self::Replaced, Self::Partial, Self::Deleted];
        let step = step.parse().ok();
        let of_a_step = candidates.iter().filter_map(|folder| step.map(folder));
        of_a_step.chain([Self::Rehearsal]).find(|folder| folder.name() == name)
    }
}

/// `step_00000200`; more digits where they are needed.
pub(super) fn step_name(step: u64) -> String {
    format!("step_{step:08}")
}

/// Name of a writer's file.
pub(super) fn shard_name(writer: usize) -> String {
    format!("rank_{writer:05}.safetensors")
}

/// Whether this is the name of a file in a folder, and leads nowhere else.
pub(super) fn is_file_name(name: &str) -> bool {
    !["", ".", ".."].contains(&name) && !name.contains(|c: char| ['/', '\\'].contains(&c) || c.is_control())
}
