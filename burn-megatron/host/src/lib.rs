//! What training needs on the host, without tensors and without Burn: [`data`] sets, [`schedule`]s of pipelines,
//! [`checkpoint`]s and other files, and formulas.
//!
//! ```
//! use host::schedule::{ScheduleKind, ScheduleSpec};
//!
//! assert_eq!("1f1b".parse(), Ok(ScheduleKind::OneFOneB));
//! ```

pub use layouts::element;

pub mod batch;
pub mod block_pool;
#[doc(hidden)]
pub mod boxes;
pub mod checkpoint;
pub mod data;
pub mod dcp;
pub mod flops;
pub mod grpo;
#[doc(hidden)]
pub mod host_memory;
pub mod json_grammar;
#[doc(hidden)]
pub mod local_time;
pub mod logits;
pub mod lr;
#[doc(hidden)]
pub mod partial_file;
#[doc(hidden)]
pub mod positioned;
pub mod preference;
pub mod quantise;
#[doc(hidden)]
pub mod refusal;
#[doc(hidden)]
pub mod safetensors_header;
pub mod schedule;
pub mod trace;
