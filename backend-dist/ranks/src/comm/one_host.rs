//! What the members of a group in several processes of one host tell each other without the network.

#[cfg(target_os = "linux")]
mod board;
#[cfg(not(target_os = "linux"))]
#[path = "one_host/none.rs"]
mod board;
mod pieces;

#[cfg_attr(not(feature = "cuda"), expect(unused_imports, reason = "GPUs of several processes need it"))]
pub(crate) use {
    board::SharedBoard,
    pieces::{Packed, piece},
};

use super::Group;

/// The longest note, in bytes.
const LONGEST: usize = 4096 - 16;

/// What this member has, if all have it, else the reason of the first that has none; a collective.
pub(crate) fn agree<T>(group: &Group, own: Result<T, String>) -> Result<T, String> {
    let reasons = group.all_gather_host(own.as_ref().err().cloned());
    let first = reasons.into_iter().enumerate().find_map(|(member, reason)| Some((member, reason?)));
    match first {
        Some((member, reason)) => Err(format!("rank {}: {reason}", group.ranks()[member])),
        None => own,
    }
}
