//! Proof that a layout trains like one device: the same losses, gradients and parameters in double precision.

mod candidate;
mod compare;
mod layouts;
mod run;
mod table;
mod trace;

pub use candidate::Candidate;
pub(crate) use compare::worst_of;
pub use compare::{Differences, Reference, Worst, compare};
pub use layouts::candidates;
pub use run::{Settings, TOLERANCE, verify};
pub use table::Row;
pub use trace::{Job, LocalTensor, RankTrace, TraceError, assemble, parameters, trace};
