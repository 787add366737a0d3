//! Commands that run in several processes, as torchrun or srun starts them, and commands that do not.

use std::fmt::Display;
use std::process::ExitCode;

use anyhow::{Result, bail};
use backend_dist::gpu;
use backend_dist::mesh::Mesh;
use backend_dist::process::{Cluster, JoinError, ProcessWorld, Processes};

use super::device::DeviceKind;
use crate::config::{ModuleConfig, RunConfig};
use crate::console::say;

/// Joins the other processes of a run, if there are any. An illegal layout is left for the plan to refuse. Fails if the
/// environment is wrong, a process does not come, or the processes were started with different arguments.
pub(super) fn join(config: &RunConfig, place: DeviceKind) -> Result<Option<Processes>> {
    let (Some(world), Ok(mesh)) = (ProcessWorld::from_env()?, Mesh::new(config.parallel.clone())) else {
        return Ok(None);
    };
    let agreement = agreement(place, ("configuration", assignments(&config.to_toml())));
    match Processes::join(&world, &mesh, &agreement) {
        Err(error @ JoinError::Division { .. }) => bail!("{error}; --data-parallel auto fills all ranks"),
        joined => Ok(Some(joined?)),
    }
}

/// The same for the run of a plain Burn module, whose learner joins its ranks itself.
pub(super) fn join_module(config: &ModuleConfig, place: DeviceKind) -> Result<Cluster> {
    Ok(Cluster::from_env(&agreement(place, ("configuration", assignments(&config.to_toml()))))?)
}

/// Does the work of a command in all processes of a run: all have the same arguments, and if it fails in one, it fails
/// in all. Fails as [`join`], and those of the work in any process.
pub(super) fn together(place: DeviceKind, work: impl FnOnce(&Cluster) -> Result<ExitCode>) -> Result<ExitCode> {
    let cluster = Cluster::from_env(&agreement(place, ("arguments", flags(std::env::args().skip(1)))))?;
    cluster.run(|| work(&cluster))
}

/// Prints a line, once for all processes.
pub(super) fn tell(cluster: &Cluster, line: impl Display) {
    if cluster.is_first() {
        say(line);
    }
}

/// What all processes must have in common.
fn agreement(place: DeviceKind, more: (&'static str, String)) -> Vec<(&'static str, String)> {
    let mut agreement = vec![("device", format!("{place:?}").to_lowercase())];
    if place == DeviceKind::Cuda {
        let version = gpu::nccl_version().map(|version| version.to_string());
        agreement.push(("NCCL", version.unwrap_or_else(|_| "missing".into())));
    }
    agreement.push(more);
    agreement
}

/// A line for each flag, with its values.
fn flags(words: impl Iterator<Item = String>) -> String {
    let mut text = String::new();
    for word in words {
        text += match word.starts_with("--") {
            _ if text.is_empty() => "",
            true => "\n",
            false => " ",
        };
        text += &word;
    }
    text
}

/// A line for each key, with its section and without its meaning. Differences between processes are reported in such
/// lines.
fn assignments(text: &str) -> String {
    let mut section = "";
    let mut assignments = Vec::new();
    for line in text.lines() {
        let line = line.rsplit_once(" # ").map_or(line, |(assignment, _)| assignment.trim_end());
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(name) => section = name,
            None if line.contains(" = ") => assignments.push(format!("{section}.{line}")),
            None => {}
        }
    }
    assignments.join("\n")
}

/// Refuses to run `command` as one of several processes. Fails if the environment asks for several.
pub(super) fn alone(command: &str) -> Result<()> {
    if let Some(world) = ProcessWorld::from_env()? {
        bail!(
            "`{command}` runs in one process with all ranks, but this is one of {} (WORLD_SIZE): start it by itself, or with one \
             process",
            world.processes
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_compared_flag_by_flag() {
        let words = ["verify", "--layout", "TP2 SP", "--seed", "3", "--share-gpus"].map(String::from);
        assert_eq!(flags(words.into_iter()), "verify\n--layout TP2 SP\n--seed 3\n--share-gpus");
    }

    #[test]
    fn what_processes_compare_is_every_key_with_its_section() {
        let config = |text: &str| assignments(&RunConfig::parse("run.toml", text, &[]).unwrap().to_toml());
        let (ours, theirs) = (config("[lr]\nmin = 1e-5\n"), config("[lr]\nmin = 1e-6\n"));
        let differ: Vec<_> = ours.lines().zip(theirs.lines()).filter(|(ours, theirs)| ours != theirs).collect();
        assert_eq!(differ, [("lr.min = 0.00001", "lr.min = 0.000001")]);
        assert!(ours.lines().all(|line| line.split(" = ").next().is_some_and(|key| key.contains('.'))), "{ours}");
        assert!(ours.lines().count() > 80, "{ours}");
    }
}
