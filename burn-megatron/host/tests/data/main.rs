//! Data, from outside: Megatron's own files, and damaged ones.

#[path = "../../../tests/support/damage.rs"]
mod damage;
mod fuzz;
mod masked;
mod oracles;
