//! Commands that run in several processes, as torchrun or srun starts them, and commands that do not.

use anyhow::{Result, bail};
use backend_dist::gpu;
use backend_dist::mesh::Mesh;
use backend_dist::process::{ProcessWorld, Processes};

use super::device::DeviceKind;
use crate::config::RunConfig;

/// Joins the other processes of a run, if there are any. An illegal layout is left for the plan to refuse.
///
/// # Errors
/// If the environment is wrong, a process does not come, or the processes were started with different arguments.
pub(super) fn join(config: &RunConfig, place: DeviceKind) -> Result<Option<Processes>> {
    let (Some(world), Ok(mesh)) = (ProcessWorld::from_env()?, Mesh::new(config.parallel.clone())) else {
        return Ok(None);
    };
    let mut agreement = vec![("device", format!("{place:?}").to_lowercase())];
    if place == DeviceKind::Cuda {
        let version = gpu::nccl_version().map(|version| version.to_string());
        agreement.push(("NCCL", version.unwrap_or_else(|_| "missing".into())));
    }
    agreement.push(("configuration", assignments(&config.to_toml())));
    Ok(Some(Processes::join(&world, &mesh, &agreement)?))
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

/// Refuses to run `command` as one of several processes.
///
/// # Errors
/// If the environment asks for several.
pub(super) fn alone(command: &str) -> Result<()> {
    if let Some(world) = ProcessWorld::from_env()? {
        bail!(
            "`{command}` runs all ranks in one process, but this is one of {} (WORLD_SIZE): start it by itself, or with one \
             process; `train` runs in several",
            world.processes
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

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
