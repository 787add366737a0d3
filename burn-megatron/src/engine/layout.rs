//! Which layouts the engine runs.

use backend_dist::mesh::{LayoutError, ParallelLayout};
use thiserror::Error;

/// Why a layout cannot be trained in.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NotRunnable {
    /// The sizes make no layout.
    #[error(transparent)]
    Illegal(#[from] LayoutError),
    /// A kind of parallelism that is not there yet.
    #[error(
        "{key} {value} does not run yet: this version trains with tensor, sequence, expert, pipeline and data parallelism; nearest legal: {legal}"
    )]
    NotYet {
        /// Name of the size, as its flag is spelled.
        key: &'static str,
        /// The refused size.
        value: usize,
        /// The closest size that runs.
        legal: usize,
    },
}

/// Refuses layouts that are illegal or do not run yet.
///
/// # Errors
/// Naming the key and the nearest legal value.
pub fn runnable(layout: &ParallelLayout) -> Result<(), NotRunnable> {
    layout.check()?;
    if layout.cp > 1 {
        return Err(NotRunnable::NotYet { key: "context-parallel", value: layout.cp, legal: 1 });
    }
    Ok(())
}
