//! Memory of a bucket's weights and moments on its device.

use super::super::blocks::Blocks;
use super::super::config::OptimizerConfig;
use super::super::flat::Flat;
use super::super::gpu::Weights;
use super::super::layout::{Layout, Part};
use super::super::states::StateDtype;
use super::Bucket;
use burn::tensor::Device;

/// Start of each part in the second moments, which only have the parts that need one.
pub(super) fn second_at(layout: &Layout, parts: &[Part], config: &OptimizerConfig) -> Vec<Option<usize>> {
    let (of_matrices, of_others) = config.moments();
    let has = |part: &Part| if layout.units[part.unit].matrix { of_matrices > 1 } else { of_others > 1 };
    // Where all parts have a second moment, they lie in it as in the region.
    let all = parts.iter().all(has);
    let mut end = 0;
    let mut at = |part: &Part| {
        has(part).then(|| {
            let start = if all { part.at } else { end };
            end = start + part.range.len();
            start
        })
    };
    parts.iter().map(&mut at).collect()
}

impl Bucket {
    /// Weights on GPUs, but under ZeRO 3, and zeroed moments, unless these are in host memory.
    pub fn allocate(&mut self, config: &OptimizerConfig, device: &Device) {
        let (states, dtype, len) = (config.states(), self.dtype, self.region.len());
        if self.sharding.zero < 3 {
            self.weights = Weights::new(&self.layout, &self.region, device, dtype, self.has_remainders());
        }
        let (of_matrices, of_others) = config.moments();
        let has_moments = |part: &Part| match self.layout.units[part.unit].matrix {
            true => of_matrices > 0,
            false => of_others > 0,
        };
        if self.hosted.is_some() || !self.parts.iter().any(has_moments) {
            return;
        }
        if states.in_blocks(dtype) {
            self.blocks = Some(Blocks::zeros(len, device));
            return;
        }
        let buffer = |len: usize, state: StateDtype| (len > 0).then(|| Flat::zeros(len, device, state.with(dtype)));
        self.first = buffer(len, states.exp_avg);
        let all = self.second_at.iter().all(Option::is_some);
        let ends = self.parts.iter().zip(&self.second_at).filter_map(|(part, at)| Some((*at)? + part.range.len()));
        let end = ends.max().unwrap_or(0);
        // One launch goes over whole regions.
        self.second = buffer(if self.launches.is_some() && all && end > 0 { len } else { end }, states.exp_avg_sq);
    }

    /// Whether masters are weights and remainders in GPU memory.
    pub fn has_remainders(&self) -> bool {
        self.split && self.hosted.is_none()
    }
}
