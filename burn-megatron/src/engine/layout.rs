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
        "{key} {value} does not run yet: this version trains with tensor, sequence, context, pipeline and data parallelism; nearest legal: {legal}"
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
    let limits = [("expert-parallel", layout.ep, 1)];
    if let Some((key, value, legal)) = limits.into_iter().find(|(_, value, legal)| value > legal) {
        return Err(NotRunnable::NotYet { key, value, legal });
    }
    match layout.etp {
        Some(value) if value != layout.tp => {
            Err(NotRunnable::NotYet { key: "expert-tensor-parallel", value, legal: layout.tp })
        }
        _ => Ok(()),
    }
}
