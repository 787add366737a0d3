//! What torchrun, srun and others that set the same variables say of a process.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// How long processes wait for each other at the start.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long a connection may be silent before its other end counts as gone; heartbeats come every fifth of it.
const SILENCE: Duration = Duration::from_secs(30);
/// The longest patience, in seconds: a week.
const LONGEST: usize = 7 * 24 * 60 * 60;

/// A variable of the environment that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{variable} {}: expected {expected}", value.as_ref().map_or("is not set".into(), |value| format!("= {value:?}")))]
pub struct EnvironmentError {
    /// The variable.
    pub variable: &'static str,
    /// Its value, if it has one.
    pub value: Option<String>,
    /// What would do.
    pub expected: String,
}

/// One process among several, as its launcher has described it.
///
/// ```
/// use ranks::process::ProcessWorld;
///
/// let torchrun = [
///     ("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "4"),
///     ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500"),
/// ];
/// let variables = torchrun.map(|(name, value)| (name.to_string(), value.to_string())).into();
/// let world = ProcessWorld::from_variables(&variables)?.expect("8 processes");
/// assert_eq!((world.process, world.processes, world.share(16)), (5, 8, Some(2)));
/// # Ok::<(), ranks::process::EnvironmentError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessWorld {
    /// This process, `0..processes`.
    pub process: usize,
    /// Processes of the world; at least 2.
    pub processes: usize,
    /// This process among those of its host.
    pub local: usize,
    /// Processes of its host.
    pub on_host: usize,
    /// Name or address of the host of process 0.
    pub address: String,
    /// Port on which process 0 listens.
    pub port: u16,
    /// How long processes wait for each other at the start.
    pub patience: Duration,
    /// How long a connection may be silent before its other end counts as gone.
    pub silence: Duration,
    /// Whether all processes are on one host.
    pub one_host: bool,
    /// What the launcher calls this run, the same in all its processes; tells them from those of other runs.
    pub run: String,
    /// What only the processes of this run know.
    pub secret: Secret,
}

/// A password that is never shown, and never sent: each end of a connection proves that it knows it. Empty where there
/// is none.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(pub(crate) String);

impl From<&str> for Secret {
    fn from(secret: &str) -> Self {
        Self(secret.into())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

/// What Open MPI's mpirun and srun call the number of a process, how many there are, and its number on its host. Under
/// mpirun srun's variables are those of the job around it.
const OTHERS: [[&str; 3]; 2] = [
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
];

/// What launchers call a run or a job.
const RUN: [&str; 2] = ["TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"];

impl ProcessWorld {
    /// Process `process` of `processes` on this host; process 0 listens on `port`.
    pub fn on_one_host(process: usize, processes: usize, port: u16) -> Self {
        let (address, run) = ("127.0.0.1".to_string(), String::new());
        let (patience, silence, one_host, secret) = (PATIENCE, SILENCE, true, Secret::default());
        let (local, on_host) = (process, processes);
        Self { process, processes, local, on_host, address, port, patience, silence, one_host, run, secret }
    }

    /// The world that the variables of this process describe; `None` if it is alone. See
    /// [`from_variables`](Self::from_variables).
    pub fn from_env() -> Result<Option<Self>, EnvironmentError> {
        // A variable that is not text is none of ours.
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        Self::from_variables(&std::env::vars_os().filter_map(text).collect())
    }

    /// The world that these variables describe; `None` if they speak of one process or none.
    ///
    /// torchrun sets `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`; here a
    /// "rank" of theirs is a process. Under Open MPI's mpirun and under srun, `OMPI_COMM_WORLD_RANK`, `_SIZE` and
    /// `_LOCAL_RANK`, or `SLURM_PROCID`, `SLURM_NTASKS` and `SLURM_LOCALID` take their place if `RANK` is not set and
    /// `MASTER_ADDR` is.
    ///
    /// Process 0 listens on `BURN_MEGATRON_PORT`, or else on `MASTER_PORT`; but where torchrun's agent itself keeps a
    /// store on that port (it then sets `TORCHELASTIC_USE_AGENT_STORE=True`), on the next one. `BURN_MEGATRON_TIMEOUT`
    /// is the patience in seconds, 300 by default. Processes with another `BURN_MEGATRON_SECRET` are not let in.
    /// `TORCHELASTIC_RUN_ID` and `SLURM_JOB_ID` must be the same in all
    /// processes, if they are set.
    ///
    /// # Errors
    /// The first variable that is missing or makes no sense.
    pub fn from_variables(variables: &BTreeMap<String, String>) -> Result<Option<Self>, EnvironmentError> {
        let has = |name: &str| variables.contains_key(name);
        let other = OTHERS.into_iter().find(|[rank, ..]| !has("RANK") && has("MASTER_ADDR") && has(rank));
        let [rank, size, local_rank] = other.unwrap_or(["RANK", "WORLD_SIZE", "LOCAL_RANK"]);
        if !has(rank) && !has(size) {
            return alone(variables).map(|()| None);
        }
        let processes = number(variables, size, "the number of processes, at least 1", |size| size >= 1)?;
        let process =
            number(variables, rank, &format!("a process of {size} = {processes}, so 0 to {}", processes - 1), |p| {
                p < processes
            })?;
        if processes == 1 {
            return Ok(None);
        }
        let here = match has("LOCAL_WORLD_SIZE") && other.is_none() {
            true => {
                let expected = format!("the number of processes of this host, 1 to {size} = {processes}");
                number(variables, "LOCAL_WORLD_SIZE", &expected, |here| (1..=processes).contains(&here))?
            }
            false => processes,
        };
        let on_host = here / hosts(variables, size).unwrap_or(1).max(1);
        let one_host = on_host == processes;
        let expected = format!("the number of this process among the {here} of its host, so 0 to {}", here - 1);
        let local = number(variables, local_rank, &expected, |local| local < here)?;
        let address = variables.get("MASTER_ADDR").filter(|address| !address.is_empty()).cloned();
        let address = address.ok_or_else(|| {
            wrong(
                variables,
                "MASTER_ADDR",
                format!("the name or address of the host of process 0, as there are {processes}"),
            )
        })?;
        let patience = match has("BURN_MEGATRON_TIMEOUT") {
            true => {
                let expected = format!("a number of seconds, 1 to {LONGEST} (a week)");
                let legal = |seconds| (1..=LONGEST).contains(&seconds);
                Duration::from_secs(number(variables, "BURN_MEGATRON_TIMEOUT", &expected, legal)? as u64)
            }
            false => PATIENCE,
        };
        let name = |variable: &&str| Some(format!("{variable}={}", variables.get(*variable)?));
        let run = RUN.iter().filter_map(name).collect::<Vec<_>>().join(" ");
        let (port, silence) = (port(variables)?, SILENCE);
        let secret = Secret(variables.get("BURN_MEGATRON_SECRET").cloned().unwrap_or_default());
        Ok(Some(Self { process, processes, local, on_host, address, port, patience, silence, one_host, run, secret }))
    }

    /// Ranks that each process hosts, of `ranks` in all; `None` if they cannot be shared out evenly.
    pub fn share(&self, ranks: usize) -> Option<usize> {
        (ranks > 0 && ranks.is_multiple_of(self.processes)).then(|| ranks / self.processes)
    }
}

/// Over how many hosts mpirun or srun has spread the processes, where it says so.
fn hosts(variables: &BTreeMap<String, String>, size: &str) -> Option<usize> {
    let read = |name: &str| variables.get(name)?.trim().parse::<usize>().ok();
    match size {
        "OMPI_COMM_WORLD_SIZE" => read(size)?.checked_div(read("OMPI_COMM_WORLD_LOCAL_SIZE")?),
        "SLURM_NTASKS" => read("SLURM_STEP_NUM_NODES").or_else(|| read("SLURM_NNODES")),
        _ => None,
    }
}

/// Refuses processes that have been started together and cannot find each other: each would do all of the work, into
/// the same folders.
fn alone(variables: &BTreeMap<String, String>) -> Result<(), EnvironmentError> {
    for variable in ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"] {
        let processes: usize = variables.get(variable).and_then(|number| number.trim().parse().ok()).unwrap_or(1);
        if processes > 1 {
            let expected = "1, or MASTER_ADDR and MASTER_PORT too: where process 0 listens for the others";
            return Err(wrong(variables, variable, expected.into()));
        }
    }
    Ok(())
}

/// The port of process 0.
fn port(variables: &BTreeMap<String, String>) -> Result<u16, EnvironmentError> {
    const EXPECTED: &str = "a free port of the host of process 0, 1 to 65535, the same in all processes";
    let read = |name| number(variables, name, EXPECTED, |port| (1..=65535).contains(&port)).map(|port| port as u16);
    if variables.contains_key("BURN_MEGATRON_PORT") {
        return read("BURN_MEGATRON_PORT");
    }
    let master = read("MASTER_PORT")?;
    // torch.distributed.rendezvous: then the workers are clients of a TCPStore that the agent holds on MASTER_PORT.
    let is_taken = variables.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
    Ok(match (is_taken, master) {
        (false, port) => port,
        (true, u16::MAX) => u16::MAX - 1,
        (true, port) => port + 1,
    })
}

fn number(
    variables: &BTreeMap<String, String>,
    name: &'static str,
    expected: &str,
    legal: impl FnOnce(usize) -> bool,
) -> Result<usize, EnvironmentError> {
    let value = variables.get(name).and_then(|value| value.trim().parse().ok());
    value.filter(|value| legal(*value)).ok_or_else(|| wrong(variables, name, expected.to_string()))
}

fn wrong(variables: &BTreeMap<String, String>, variable: &'static str, expected: String) -> EnvironmentError {
    EnvironmentError { variable, value: variables.get(variable).cloned(), expected }
}

#[cfg(test)]
mod tests;
