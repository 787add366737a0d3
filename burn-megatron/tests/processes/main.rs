//! Commands in several processes, started as torchrun starts them.

#[macro_use]
#[path = "../support/says.rs"]
mod says;

mod commands;
mod module;
mod restarts;
mod train;

use std::io::Read;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// What torchrun tells process `process` of `processes` on one host.
struct Process {
    process: usize,
    processes: usize,
    port: u16,
}

fn all(processes: usize) -> Vec<Process> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    (0..processes).map(|process| Process { process, processes, port }).collect()
}

const PROGRAM: &str = env!("CARGO_BIN_EXE_burn-megatron");

/// In an argument `+` stands for a space.
fn command(folder: &Path, arguments: &str, process: Option<&Process>) -> Command {
    command_of(Path::new(PROGRAM), folder, arguments, process)
}

fn command_of(program: &Path, folder: &Path, arguments: &str, process: Option<&Process>) -> Command {
    let mut command = Command::new(program);
    let words = arguments.split_whitespace().map(|word| word.replace('+', " "));
    command.current_dir(folder).args(words).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let Some(Process { process, processes, port }) = process {
        let [process, processes] = [process, processes].map(ToString::to_string);
        command.env("RANK", &process).env("LOCAL_RANK", &process);
        command.env("WORLD_SIZE", &processes).env("LOCAL_WORLD_SIZE", &processes);
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
    }
    command
}

/// How a process ended, and what it said on stdout and stderr.
struct Ended {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

/// Waits, but not for ever.
fn ended(mut child: Child, patience: Duration) -> Ended {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > patience {
            child.kill().unwrap();
            panic!("a process was still running after {patience:?}");
        }
        sleep(Duration::from_millis(20));
    }
    let (mut stdout, mut stderr) = (String::new(), String::new());
    // Taken by who has read the first lines.
    child.stdout.take().map(|mut out| out.read_to_string(&mut stdout).unwrap());
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    Ended { status: child.wait().unwrap(), stdout, stderr }
}

fn start(folder: &Path, arguments: &str, processes: &[Process]) -> Vec<Child> {
    processes.iter().map(|process| command(folder, arguments, Some(process)).spawn().unwrap()).collect()
}

fn run(folder: &Path, arguments: &str, processes: usize) -> Vec<Ended> {
    let children = start(folder, arguments, &all(processes));
    children.into_iter().map(|child| ended(child, Duration::from_secs(240))).collect()
}
