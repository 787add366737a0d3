//! A recorded training run of Megatron-Core: model, optimizer, tokens, losses, and weights before and after.

use super::files::{self, FileError};
use crate::engine::TokenBatch;
use backend_dist::shard::HostTensor;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::Path;

/// The recorded model, as `metrics.json` writes it.
#[derive(Clone, Debug, Deserialize)]
#[allow(missing_docs, reason = "each field is Megatron's argument of that name")]
pub struct OracleModel {
    pub num_layers: usize,
    pub hidden_size: usize,
    pub ffn_hidden_size: usize,
    pub num_attention_heads: usize,
    pub num_query_groups: usize,
    pub vocab_size: usize,
    pub seq_length: usize,
    /// For example `RMSNorm eps 1e-05`.
    pub norm: String,
    pub activation: String,
    /// For example `rope base 10000, rotate-half, full head dim`.
    pub position: String,
    pub bias: bool,
    pub tie_embeddings: bool,
    #[serde(default)]
    pub experts: usize,
    /// Experts that a token uses.
    #[serde(default)]
    pub moe_topk: usize,
    #[serde(default)]
    pub moe_aux_loss_coeff: f64,
    #[serde(default)]
    pub moe_ffn_hidden_size: usize,
}

/// Batch sizes and optimizer, as `metrics.json` writes them.
#[derive(Clone, Debug, Deserialize)]
pub struct OracleTraining {
    /// Sequences per optimizer step.
    pub global_batch_size: usize,
    /// Sequences per forward and backward pass.
    pub micro_batch_size: usize,
    /// In words, for example `AdamW lr 1e-2 constant, betas 0.9 0.95, eps 1e-8, weight decay 0.1, clip 1.0, fp32`.
    pub optimizer: String,
}

/// What Megatron logged for a step.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct OracleStep {
    /// Step, counted from 0.
    pub step: u64,
    /// Mean loss of the global batch.
    pub loss: f64,
    /// Global gradient norm before clipping.
    pub grad_norm: f64,
}

#[derive(Deserialize)]
struct Metrics {
    model: OracleModel,
    train: OracleTraining,
    steps: Vec<OracleStep>,
}

/// A whole recorded run.
#[derive(Clone, Debug)]
pub struct Oracle {
    /// The model.
    pub model: OracleModel,
    /// Batch sizes and optimizer.
    pub training: OracleTraining,
    /// Losses and gradient norms.
    pub steps: Vec<OracleStep>,
    /// The global batch of each step.
    pub batches: Vec<TokenBatch>,
    /// Weights before the first step, under Megatron's names.
    pub initial: BTreeMap<String, HostTensor>,
    /// Weights after the last step, under Megatron's names.
    pub last: BTreeMap<String, HostTensor>,
}

impl Oracle {
    /// Reads `metrics.json`, `tokens.safetensors`, `init.safetensors` and `final.safetensors` of a folder. Fails if a
    /// file is missing or is not what it should be; the error names the file.
    pub fn load(dir: &Path) -> Result<Self, FileError> {
        let path = dir.join("metrics.json");
        let text = std::fs::read_to_string(&path).map_err(|source| FileError::Read { path: path.clone(), source })?;
        let Metrics { model, train, steps } =
            serde_json::from_str(&text).map_err(|source| FileError::Json { path, source })?;
        let path = dir.join("tokens.safetensors");
        let tokens = files::integers(&path)?;
        let batch = |step: &OracleStep| {
            let name = format!("step_{}", step.step);
            let expected = vec![train.global_batch_size, model.seq_length + 1];
            match tokens.get(&name) {
                Some((shape, ids)) if *shape == expected => Ok(TokenBatch::from_sequences(ids, model.seq_length)),
                found => Err(FileError::Tensor {
                    path: path.clone(),
                    name,
                    expected,
                    found: found.map(|(shape, _)| shape.clone()),
                }),
            }
        };
        let batches = steps.iter().map(batch).collect::<Result<_, _>>()?;
        let (initial, last) =
            (files::floats(&dir.join("init.safetensors"))?, files::floats(&dir.join("final.safetensors"))?);
        Ok(Self { model, training: train, steps, batches, initial, last })
    }
}
