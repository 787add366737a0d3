//! The adapter that a run starts from.

use std::path::Path;

use models::LoraPlan;
use models::lora::{Adapter, LoraConfig};
use serde_json::json;

/// The adapter of `lora.adapter`, which must be one as `[lora]` says.
pub(super) fn as_configured(path: &Path, adapter: Adapter, ours: Option<&LoraPlan>) -> Result<Adapter, String> {
    if ours.is_some_and(|ours| ours.is_like(&adapter.plan)) {
        return Ok(adapter);
    }
    let LoraConfig { rank, alpha, rslora, dora, rank_pattern, alpha_pattern, .. } = adapter.plan.config();
    let patterns = [("rank-pattern", json!(rank_pattern)), ("alpha-pattern", json!(alpha_pattern))];
    let patterns = patterns.iter().filter(|(_, own)| *own != json!({}));
    let patterns: String = patterns.map(|(key, own)| format!(", {key} = {own}")).collect();
    Err(format!(
        "lora.adapter = {}: it has rank = {rank}, alpha = {alpha}, rslora = {rslora}, dora = {dora}{patterns} on {} layers, \
         [lora] says otherwise; give these values, and its target-modules",
        path.display(),
        adapter.plan.len()
    ))
}
