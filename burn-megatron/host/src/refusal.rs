//! What a user can do where the file system refuses.

use std::io;
use std::path::Path;

use rustix::io::Errno;

/// What a program wanted of a file or folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read it.
    Read,
    /// To make it, write to it or remove it.
    Write,
}

/// What to do about a refusal, to be put after words that name the file and the cause; nothing where they say it all.
pub fn advice(access: Access, cause: &io::Error) -> &'static str {
    use Access::{Read, Write};
    use io::ErrorKind as Kind;
    let is = |errno: Errno| cause.raw_os_error() == Some(errno.raw_os_error());
    if is(Errno::MFILE) || is(Errno::NFILE) {
        return "; too many files are open: raise the limit (`ulimit -n`)";
    }
    if is(Errno::ISDIR) {
        return "; name a file, not a folder";
    }
    match (access, cause.kind()) {
        (Read, Kind::PermissionDenied) => "; give this user the permission to read it",
        (Write, Kind::PermissionDenied) => "; give this user the permission to write there, or choose another folder",
        (Read, Kind::NotFound) => "; check the path",
        (Read, Kind::NotADirectory) => "; a part of the path is a file, check the path",
        (Write, Kind::NotFound) => "; make its folder first, or choose another",
        (Write, Kind::AlreadyExists) => "; a file is in the way, choose another folder",
        (Write, Kind::NotADirectory) => "; a part of the path is a file, choose another folder",
        (Read, Kind::UnexpectedEof) => "; restore it",
        (Read, Kind::InvalidData) if cause.to_string().ends_with("valid UTF-8") => "; name a text file in UTF-8",
        (Write, Kind::ReadOnlyFilesystem) => "; the file system is read-only, choose another folder",
        (Write, Kind::StorageFull | Kind::QuotaExceeded) => {
            "; free some space (`df`) or some inodes (`df -i`), or choose another folder"
        }
        (Write, Kind::FileTooLarge) => {
            "; a limit of the size of files is reached (`ulimit -f`, or the file system's own)"
        }
        _ => "",
    }
}

/// Why `folder` is none of Hugging Face's, and what to do: it has no `config.json`.
pub fn no_config(folder: &Path) -> String {
    let name = folder.display();
    let has = |folder: &Path, file: &str| folder.join(file).exists();
    if !folder.exists() {
        let parts: Vec<_> = folder.iter().filter_map(|part| part.to_str()).collect();
        return match parts[..] {
            [owner, model] if !owner.starts_with(['.', '/', '~']) => format!(
                "{name}: there is no such folder, and nothing is downloaded; `hf download {name} --local-dir {model}` does, \
                 name its folder"
            ),
            _ => format!("{name}: there is no such folder; check the path"),
        };
    }
    if !folder.is_dir() {
        return format!("{name} is a file; name a folder with config.json");
    }
    if has(folder, "latest") || has(folder, "manifest.json") {
        return format!("{name} is a checkpoint; `burn-megatron export --checkpoint {name}` makes a folder of it");
    }
    let inside = folder.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let nearest = inside.filter(|inside| has(inside, "config.json")).min();
    let advice = nearest.map_or("check the path".into(), |nearest| format!("nearest: {}", nearest.display()));
    format!("{name} has no config.json, as a Hugging Face folder has; {advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_a_configuration_is_told_from_others() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        for folder in ["runs/tuned-hf", "checkpoints", "empty"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        for file in ["runs/tuned-hf/config.json", "checkpoints/latest", "README.md"] {
            std::fs::write(at(file), "").unwrap();
        }
        let said = |name: &str| no_config(&at(name));
        assert!(said("runs").ends_with("runs/tuned-hf"), "{}", said("runs"));
        assert!(said("checkpoints").contains("burn-megatron export --checkpoint"), "{}", said("checkpoints"));
        assert!(said("empty").contains("has no config.json"), "{}", said("empty"));
        assert!(said("README.md").contains("is a file"), "{}", said("README.md"));
        assert!(said("none").ends_with("there is no such folder; check the path"), "{}", said("none"));
        let published = no_config(Path::new("meta-llama/Llama-3.2-1B"));
        assert!(published.contains("`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`"), "{published}");
    }

    #[test]
    fn text_that_is_not_utf_8_is_called_so() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0xff]).unwrap();
        let error = std::fs::read_to_string(file.path()).unwrap_err();
        assert_eq!(advice(Access::Read, &error), "; name a text file in UTF-8");
    }

    #[test]
    fn refusals_say_what_to_do() {
        let of = |access, errno: Errno| advice(access, &io::Error::from_raw_os_error(errno.raw_os_error()));
        for (access, errno, words) in [
            (Access::Read, Errno::ACCESS, "permission to read it"),
            (Access::Write, Errno::ACCESS, "permission to write there"),
            (Access::Read, Errno::NOENT, "check the path"),
            (Access::Read, Errno::NOTDIR, "a part of the path is a file"),
            (Access::Write, Errno::NOTDIR, "a part of the path is a file, choose"),
            (Access::Read, Errno::ISDIR, "name a file, not a folder"),
            (Access::Write, Errno::ROFS, "read-only"),
            (Access::Write, Errno::NOSPC, "free some space (`df`) or some inodes (`df -i`)"),
            (Access::Write, Errno::DQUOT, "free some space"),
            (Access::Write, Errno::FBIG, "ulimit -f"),
            (Access::Read, Errno::MFILE, "ulimit -n"),
            (Access::Write, Errno::NFILE, "ulimit -n"),
        ] {
            let text = of(access, errno);
            assert!(text.starts_with("; ") && text.contains(words), "{access:?} {errno:?}: {text}");
        }
        assert_eq!(of(Access::Read, Errno::IO), "", "a disk that fails is beyond advice");
        assert_eq!(advice(Access::Read, &io::ErrorKind::UnexpectedEof.into()), "; restore it");
    }
}
