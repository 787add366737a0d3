//! Data, from outside: the command line. Megatron's own files and damaged ones are read in `host/tests/data`.

#[macro_use]
#[path = "../support/says.rs"]
mod says;

mod cli;
mod memory;
mod resume;
