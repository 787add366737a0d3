//! The origin of a measurement: date, commit, machine and command.

use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The origin of a measurement, to repeat it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Origin {
    /// UTC, `2026-01-31 23:59:00`.
    pub date: String,
    /// The commit of the code, with `+` where files had changed; `unknown` where nothing tells.
    pub commit: String,
    /// The command line.
    pub command: String,
    /// The processor and how many threads it runs at once.
    pub processor: String,
}

impl Origin {
    /// Of this process, now.
    pub fn here() -> Self {
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let mut words = std::env::args();
        let program = words.next().unwrap_or_default();
        let program = Path::new(&program).file_name().map(|name| name.to_string_lossy().into_owned());
        let command = program.into_iter().chain(words.map(quoted)).collect::<Vec<_>>().join(" ");
        Self { date: date(seconds), commit: commit(), command, processor: processor() }
    }

    /// The day, `2026-01-31`.
    pub fn day(&self) -> &str {
        self.date.split(' ').next().unwrap_or_default()
    }
}

/// A word as a shell takes it for one.
fn quoted(word: String) -> String {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=,+@%".contains(letter);
    if !word.is_empty() && word.chars().all(plain) { word } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

/// The commit in `BURN_MEGATRON_COMMIT` at compile time or at run time, or that of this repository's checkout in
/// which the process runs.
fn commit() -> String {
    let given = option_env!("BURN_MEGATRON_COMMIT").map(String::from);
    given
        .or_else(|| std::env::var("BURN_MEGATRON_COMMIT").ok())
        .filter(|commit| !commit.is_empty())
        .or_else(checkout)
        .unwrap_or_else(|| "unknown".into())
}

fn checkout() -> Option<String> {
    let root = git(&["rev-parse", "--show-toplevel"])?;
    let own = Path::new(&root).join("burn-megatron").join("Cargo.toml").is_file();
    let commit = own.then(|| git(&["rev-parse", "--short=12", "HEAD"])).flatten()?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"]).is_none_or(|files| !files.is_empty());
    Some(if changed { commit + "+" } else { commit })
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| text.trim().to_string())
}

fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let name = model.map_or("unknown processor", |(_, name)| name.trim());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{name}, {threads} threads")
}

/// UTC of so many seconds after 1970, in the proleptic Gregorian calendar
/// (<https://howardhinnant.github.io/date_algorithms.html>, `civil_from_days`).
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}", era * 400 + year + carry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_of_leap_years_and_turns() {
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00");
        assert_eq!(date(1_709_251_199), "2024-02-29 23:59:59");
        assert_eq!(date(1_798_761_600), "2027-01-01 00:00:00");
    }

    #[test]
    fn words_are_quoted_where_a_shell_needs_it() {
        let words = ["--layouts", "DP2,TP2 SP", "lognormal:4096,1.1", "it's", ""].map(|word| quoted(word.into()));
        assert_eq!(words, ["--layouts", "'DP2,TP2 SP'", "lognormal:4096,1.1", r"'it'\''s'", "''"]);
    }

    #[test]
    fn the_commit_of_this_checkout_is_found_or_unknown() {
        let origin = Origin::here();
        assert!(origin.commit == "unknown" || origin.commit.len() >= 7, "{origin:?}");
        assert_eq!(origin.day().len(), 10);
    }
}
