//! What this machine can run, item by item, and what is missing.

mod gpus;
mod host;
mod kernels;
mod links;

pub use self::host::{available_memory, host};
pub use gpus::gpus;
pub use kernels::{KernelCheck, check_kernels};
pub use links::{LinkSpeed, link_speed};
use std::fmt;

/// The state of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// In order.
    Good,
    /// Nothing that stops a run, but worth knowing.
    Note,
    /// A run needs it and does not have it.
    Missing,
}

/// One item of the report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Its state.
    pub verdict: Verdict,
    /// Its name, for example `NCCL` or `GPU 0`.
    pub what: String,
    /// What was found, or for a missing item what to do.
    pub found: String,
}

impl Item {
    fn new(verdict: Verdict, what: impl Into<String>, found: impl Into<String>) -> Self {
        Self { verdict, what: what.into(), found: found.into() }
    }

    /// The version that was found, or the error that says what is missing.
    fn of<T: fmt::Display, E: fmt::Display>(what: &str, found: Result<T, E>) -> Self {
        match found {
            Ok(found) => Self::new(Verdict::Good, what, found.to_string()),
            Err(error) => Self::new(Verdict::Missing, what, error.to_string()),
        }
    }
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = match self.verdict {
            Verdict::Good => "ok",
            Verdict::Note => "note",
            Verdict::Missing => "MISSING",
        };
        write!(f, "{verdict:<8} {:<14} {}", self.what, self.found)
    }
}

/// The last line: what this machine can run.
pub fn summary(items: &[Item], gpus: usize) -> String {
    let missing: Vec<&str> = items.iter().filter(|i| i.verdict == Verdict::Missing).map(|i| i.what.as_str()).collect();
    match (missing.is_empty(), gpus) {
        (true, 0) => "no GPU here: `--device cpu` runs every layout on CPU ranks".into(),
        (true, 1) => "1 GPU is ready: `--device cuda` runs layouts of one rank, `--device cpu` all".into(),
        (true, gpus) => {
            format!("{gpus} GPUs are ready: `--device cuda` runs layouts of up to {gpus} ranks on this host")
        }
        (false, _) => format!("not ready for runs on GPUs, missing: {}; `--device cpu` runs", missing.join(", ")),
    }
}

/// Bytes for people: `139.8 GiB`, `512 MiB`.
fn bytes(count: u64) -> String {
    let mib = count as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.0} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_says_what_runs() {
        let good = Item::of("NCCL", Ok::<_, String>("2.28.3"));
        let missing = Item::of("libdevice", Err::<String, _>("install it"));
        assert_eq!(missing.to_string(), "MISSING  libdevice      install it");
        assert!(summary(std::slice::from_ref(&good), 4).starts_with("4 GPUs are ready"));
        assert!(summary(&[good, missing], 4).contains("missing: libdevice"));
        assert!(summary(&[], 0).contains("--device cpu"));
        assert_eq!([bytes(512 << 20), bytes(141 << 30)], ["512 MiB", "141.0 GiB"]);
    }
}
