//! Runs one closure on every rank of a mesh, a thread per rank, and turns the first failure into an error.

use crate::comm::RunError;
use crate::mesh::Mesh;
use crate::process::Processes;
pub use crate::rank::{BoxError, Rank, mesh_position};
use burn::tensor::Device;

/// Runs `f` once per rank of `mesh`, each on its own thread of this process, and returns the results in rank order. For
/// ranks of several processes see [`Processes::launch`](crate::process::Processes::launch).
///
/// Rank `r` owns `devices[r % devices.len()]`; CPU ranks share one device value.
///
/// ```
/// use ranks::{launch::launch, mesh::{Axis, Mesh}};
/// use burn::tensor::Device;
///
/// let mesh = Mesh::new("DP3".parse()?)?;
/// let ranks = launch(&mesh, &[Device::flex()], |rank| Ok(rank.group(Axis::Dp).all_gather_host(10 * rank.rank)))?;
/// assert_eq!(ranks, [[0, 10, 20]; 3]);
///
/// let error = launch(&mesh, &[Device::flex()], |rank| match rank.rank {
///     2 => Err("no data".into()),
///     _ => Ok(rank.group(Axis::Dp).barrier()),
/// });
/// assert!(error.unwrap_err().to_string().starts_with("rank 2 (dp 2) failed: no data"));
/// # Ok::<(), ranks::launch::BoxError>(())
/// ```
///
/// # Errors
/// The first failure: a rank that panics, returns an error, issues another operation than its peers, waits for a rank
/// that has finished, or waits in a circle. All other ranks stop at their next operation.
pub fn launch<T: Send>(
    mesh: &Mesh,
    devices: &[Device],
    f: impl Fn(Rank) -> Result<T, BoxError> + Sync,
) -> Result<Vec<T>, RunError> {
    Processes::alone(mesh).launch(devices, f)
}
