//! The `burn-megatron` command.

use std::process::ExitCode;

use backend_dist::memory::RankAllocator;
use burn_megatron::cli;

/// The log line tells the memory of CPU ranks one by one.
#[global_allocator]
static ALLOCATOR: RankAllocator = RankAllocator;

fn main() -> ExitCode {
    match cli::run(cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {}", cli::describe(&error));
            ExitCode::FAILURE
        }
    }
}
