//! Data, from outside: Megatron's own files, and the command line.

mod cli;
mod oracles;
