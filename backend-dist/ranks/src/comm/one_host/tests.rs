//! Real processes for tests.

use crate::mesh::Mesh;
use crate::process::{ProcessWorld, Processes};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Number of the process, and the port of the first, in processes that the tests start.
const PROCESS: &str = "BURN_MEGATRON_TEST_PROCESS";
pub(crate) const PROCESSES: usize = 3;

/// This process's number, the port, and the processes that it has started as the first: each runs `test` once more.
pub(crate) fn roles(test: &str) -> (usize, u16, Vec<Child>) {
    match std::env::var(PROCESS) {
        Ok(role) => {
            let (process, port) = role.split_once(' ').unwrap();
            (process.parse().unwrap(), port.parse().unwrap(), Vec::new())
        }
        Err(_) => {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let start = |process: usize| {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["--exact", "--nocapture", test]).env(PROCESS, format!("{process} {port}"));
                command.stdout(Stdio::piped()).spawn().unwrap()
            };
            (0, port, (1..PROCESSES).map(start).collect())
        }
    }
}

/// Joins the others as process `process`, with so many data-parallel ranks in each.
pub(crate) fn join(process: usize, port: u16, ranks: usize) -> Processes {
    let world =
        ProcessWorld { patience: Duration::from_secs(60), ..ProcessWorld::on_one_host(process, PROCESSES, port) };
    let mesh = Mesh::new(format!("DP{}", ranks * PROCESSES).parse().unwrap()).unwrap();
    Processes::join(&world, &mesh, &[]).unwrap()
}
