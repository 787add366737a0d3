//! What routers leave for whoever runs the pass, and what they follow.

use super::bias::BiasCounts;
use super::routing_replay::RoutingReplay;
use super::stats::RouterStats;

/// What the routers of a rank record of the passes of training, and the run whose experts they use. By default nobody
/// asks. Clones are the same records.
#[derive(Clone, Debug, Default)]
pub struct RouterRecords {
    /// What training itself needs: it moves a bias.
    pub bias: Option<BiasCounts>,
    /// What reports show; training is the same without it.
    pub stats: Option<RouterStats>,
    /// The experts of another run.
    pub replay: Option<RoutingReplay>,
}
