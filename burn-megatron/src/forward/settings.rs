//! What goes in, how it is computed, and what comes out.

use std::collections::BTreeMap;

use backend_dist::mesh::ParallelLayout;
use backend_dist::process::Cluster;
use backend_dist::shard::HostTensor;
use burn::tensor::FloatDType;
use models::lora::Adapter;

/// Tokens, and what they should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Sequences of the batch.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// `[sequences, seq]`.
    pub ids: Vec<i64>,
    /// `[sequences, seq]`, as Hugging Face has them: the label of a token has the token's own position, and -100 does not
    /// count.
    pub labels: Option<Vec<i64>>,
}

/// How to compute.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Over which ranks.
    pub layout: ParallelLayout,
    /// The devices of the ranks; every process of the cluster has the result.
    pub cluster: Cluster,
    /// Type of weights and activations.
    pub dtype: FloatDType,
    /// Everything in `dtype`. Otherwise what transformers computes in fp32 in any case is fp32 here too: the RMSNorms
    /// and the loss.
    pub exact: bool,
    /// Whether gradients of the loss are wanted; of a model with adapters, those of the adapters.
    pub gradients: bool,
    /// Adapters of linear layers.
    pub adapter: Option<Adapter>,
}

impl Settings {
    /// The output alone of a model without adapters, as transformers computes it.
    pub fn new(cluster: impl Into<Cluster>, layout: ParallelLayout, dtype: impl Into<FloatDType>) -> Self {
        let (cluster, dtype) = (cluster.into(), dtype.into());
        Self { layout, cluster, dtype, exact: false, gradients: false, adapter: None }
    }
}

/// What came out.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// `[sequences, seq, vocab]`.
    pub logits: Vec<f64>,
    /// Mean over the labels that count, if there are labels.
    pub loss: Option<f64>,
    /// The loss's gradient of every weight, under Hugging Face's name; empty unless it was wanted.
    pub gradients: BTreeMap<String, HostTensor>,
}
