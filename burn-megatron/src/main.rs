//! The `burn-megatron` command.

use std::process::ExitCode;

use backend_dist::memory::RankAllocator;
use burn_megatron::cli;
use burn_megatron::console::warn;

#[cfg(not(feature = "cuda"))]
use std::alloc::System as Below;
// What one thread asks for another gives back, operations and launches of kernels: jemalloc does that faster.
#[cfg(feature = "cuda")]
use tikv_jemallocator::Jemalloc as Below;

/// The log line tells the memory of CPU ranks one by one.
#[global_allocator]
static ALLOCATOR: RankAllocator<Below> = RankAllocator(Below);

fn main() -> ExitCode {
    match cli::run(cli::parse()) {
        Ok(code) if code != ExitCode::FAILURE => return code,
        // It was printed.
        Ok(_) => {}
        Err(error) => warn(format_args!("error: {}", cli::describe(&error))),
    }
    // CUDA's own clean-up would end under threads that still work for a rank that has failed, and they panic.
    if cfg!(feature = "cuda") {
        // SAFETY: nothing else is to be done: files are closed, and standard output is written line by line.
        unsafe { libc::_exit(1) }
    }
    ExitCode::FAILURE
}
