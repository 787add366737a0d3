//! Several processes, on one host or many, that make up one world of ranks.
//!
//! [`ProcessWorld`] is what the launcher says of this process: torchrun, srun, or whatever sets the same variables.
//! With `P` processes and a mesh of `N` ranks, process `p` hosts ranks `p·N/P` up to `(p + 1)·N/P - 1`; so one process
//! for all GPUs of a host, one per GPU and anything between are the same program. [`Processes`] is the world after all
//! of them have joined; [`Processes::launch`] runs the ranks that live here. A program with several launches has a
//! [`Cluster`].

mod cluster;
mod environment;
mod introduction;
mod joined;
#[cfg(test)]
mod tests;

pub use cluster::Cluster;
pub use environment::{EnvironmentError, ProcessWorld, Secret};
pub use joined::{ProcessChannel, Processes};

use std::net::SocketAddr;
use std::time::Duration;

/// Why the processes did not come together.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum JoinError {
    /// The variables of the environment do not describe a world.
    #[error(transparent)]
    Environment(#[from] EnvironmentError),
    /// The ranks cannot be assigned to the processes.
    #[error(
        "{ranks} ranks ({layout}) cannot be shared out over {processes} processes (WORLD_SIZE): each hosts as many as \
         the others; nearest legal: {nearest} processes, or a layout whose number of ranks is a multiple of {processes}"
    )]
    Division { ranks: usize, layout: String, processes: usize, nearest: usize },
    /// The address of process 0 is unknown.
    #[error("MASTER_ADDR = {address}: {cause}; expected the name or address of the host of process 0")]
    Address { address: String, cause: String },
    /// Process 0 cannot listen.
    #[error(
        "process 0 cannot listen on port {port} of {address}: {cause}; another program may have the port: choose a free one with \
         BURN_MEGATRON_PORT (the same in all processes)"
    )]
    Listen { address: String, port: u16, cause: String },
    /// Some process did not come in time, as process 0 saw it.
    #[error(
        "waited {} s on {address} port {port}: process {} of {processes} did not come{}{}; see that all are started, that they can \
         reach {address}, and that no firewall closes the port (BURN_MEGATRON_PORT chooses it, BURN_MEGATRON_TIMEOUT how \
         long to wait)",
        waited.as_secs(), list(missing), came(there), closed(*strangers)
    )]
    Missing {
        address: String,
        port: u16,
        waited: Duration,
        processes: usize,
        missing: Vec<usize>,
        there: Vec<(usize, String)>,
        strangers: usize,
    },
    /// The system starts no thread for what other processes send.
    #[error("a process of {processes} needs a thread for each connection, and four: {cause}")]
    Thread { processes: usize, cause: String },
    /// Process 0 could not be reached.
    #[error(
        "process {process} tried for {} s to reach process 0 on {address} port {port} ({}): {cause}; see that process 0 runs \
         there, and that no firewall closes the port (BURN_MEGATRON_PORT chooses it, BURN_MEGATRON_TIMEOUT how long to try)",
        waited.as_secs(), tried.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    )]
    Unreachable { process: usize, address: String, port: u16, tried: Vec<SocketAddr>, waited: Duration, cause: String },
    /// The processes do not agree on what they are to do, or process 0 has given up: the same words in all of them.
    #[error("{0}")]
    Refused(String),
}

fn list(processes: &[usize]) -> String {
    processes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn came(there: &[(usize, String)]) -> String {
    let there: Vec<String> = there.iter().map(|(process, host)| format!("{process} on {host}")).collect();
    if there.is_empty() { String::new() } else { format!(" (there: {})", there.join(", ")) }
}

fn closed(strangers: usize) -> String {
    match strangers {
        0 => String::new(),
        count => format!("; {count} connections that are not of this run were closed"),
    }
}

/// Name of this host, for messages.
pub fn host_name() -> String {
    let files = ["/proc/sys/kernel/hostname", "/etc/hostname"];
    let name = files.into_iter().find_map(|file| std::fs::read_to_string(file).ok());
    name.map_or("an unnamed host".into(), |name| name.trim().to_string())
}
