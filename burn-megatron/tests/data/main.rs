//! Data, from outside: Megatron's own files, and the command line.

mod cli;
#[path = "../support/damage.rs"]
mod damage;
mod fuzz;
mod masked;
mod memory;
mod oracles;
mod resume;
