//! Flash attention.
pub mod forward;
