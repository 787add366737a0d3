//! Proof that a layout trains like one device: the same losses, gradients and parameters, in double precision to
//! its last digits and in lower ones within what rounding explains.

mod bounds;
mod candidate;
mod compare;
mod curve;
mod fp8;
mod layouts;
mod pairs;
mod run;
mod table;
mod trace;

pub use bounds::{Bounds, Measure, TOLERANCE};
pub use candidate::{Candidate, CandidateError};
pub(crate) use compare::worst_of;
pub use compare::{Differences, Reference, Worst, compare};
pub use curve::{Curve, curve};
pub use fp8::{different_in_fp8, is_any_in_fp8};
pub use layouts::{candidates, pairwise};
pub use run::{LoraKind, Settings, verify};
pub use table::Line;
pub use trace::{Job, LocalTensor, RankTrace, TraceError, assemble, first_copies, parameters, trace};
