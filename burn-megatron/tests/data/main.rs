//! Data, from outside: the command line. Megatron's own files and damaged ones are read in `host/tests/data`.

#[path = "../support/command.rs"]
mod command;
#[macro_use]
#[path = "../support/says.rs"]
mod says;

mod cli;
mod memory;
mod resume;
