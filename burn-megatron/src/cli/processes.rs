//! Commands that several processes run together, as torchrun or srun starts them, and those that they do not.

use anyhow::{Result, bail};
use backend_dist::gpu;
use backend_dist::mesh::Mesh;
use backend_dist::process::{ProcessWorld, Processes};

use super::device::Place;
use crate::config::RunConfig;

/// Meets the other processes of a run, if there are any. A layout that is none is left for the plan to refuse.
///
/// # Errors
/// If the environment is wrong, somebody does not come, or the processes have been started differently.
pub(super) fn join(config: &RunConfig, place: Place) -> Result<Option<Processes>> {
    let (Some(world), Ok(mesh)) = (ProcessWorld::from_env()?, Mesh::new(config.parallel.clone())) else {
        return Ok(None);
    };
    let mut agreement = vec![("device", format!("{place:?}").to_lowercase())];
    if place == Place::Cuda {
        let version = gpu::nccl_version().map(|version| version.to_string());
        agreement.push(("NCCL", version.unwrap_or_else(|_| "missing".into())));
    }
    // Without the meanings, so that a line that differs is short.
    let text = config.to_toml();
    let keys = text.lines().map(|line| line.rsplit_once(" # ").map_or(line, |(key, _)| key.trim_end()));
    agreement.push(("configuration", keys.collect::<Vec<_>>().join("\n")));
    Ok(Some(Processes::join(&world, &mesh, &agreement)?))
}

/// Refuses to run `command` as one of several processes.
///
/// # Errors
/// If the environment speaks of several.
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
