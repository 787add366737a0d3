//! Data, from outside: the command line. Megatron's own files and damaged ones are read in `host/tests/data`.

mod cli;
mod memory;
mod resume;
