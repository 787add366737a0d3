//! An embedding and an output layer sharded along the vocabulary, with Burn's cross-entropy between logits that no rank has
//! whole.

use crate::harness::{Case, ints};
use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::Device;

const VOCABULARY: usize = 24;
const HIDDEN: usize = 16;

#[derive(Module, Debug)]
struct Model {
    tokens: Embedding,
    output: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let output = LinearConfig::new(HIDDEN, VOCABULARY).with_bias(true).init(device);
        Self { tokens: EmbeddingConfig::new(VOCABULARY, HIDDEN).init(device), output }
    }
}

#[test]
fn cross_entropy_of_sharded_logits_communicates_a_number_for_each_token() {
    let case = Case::<Model> {
        init: Model::new,
        loss: |model, device, _| {
            let (tokens, classes) = (ints([4, 6], VOCABULARY, device), ints([24], VOCABULARY, device));
            let hidden = model.tokens.forward(tokens).tanh();
            let logits = model.output.forward(hidden).reshape([24, VOCABULARY]);
            CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, classes)
        },
    };
    for layout in ["TP2", "TP4"] {
        let report = case.check(layout, &Plan::auto().columns("output"));
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        // As Megatron-LM's: forward the embedding, and the maximum, the sum and the class's logit of each token; backward
        // the hidden states' gradient.
        assert_eq!(report.times("all-reduce"), 5, "{layout}: {report}");
        for other in ["all-gather", "reduce-scatter", "all-to-all"] {
            assert_eq!(report.times(other), 0, "{layout}: {report}");
        }
        let (tokens, width) = (24, 8);
        assert_eq!(report.collectives["all-reduce"].bytes, (2 * HIDDEN + 3) * tokens * width, "{layout}: {report}");
    }
}

#[test]
fn a_vocabulary_that_the_ranks_do_not_divide_leaves_the_embedding_sharded_by_features() {
    let case = Case::<Embedding> {
        init: |device| EmbeddingConfig::new(23, HIDDEN).init(device),
        loss: |model, device, _| model.forward(ints([4, 6], 23, device)).powi_scalar(2).mean(),
    };
    let report = case.check("TP2", &Plan::auto());
    // Each rank has its features, of the gradient too.
    assert!(report.collectives.is_empty() && report.fallbacks.is_empty(), "{report}");
}

#[test]
fn rows_of_a_table_that_is_also_the_output_layer() {
    let case = Case::<Embedding> {
        init: |device| EmbeddingConfig::new(VOCABULARY, HIDDEN).init(device),
        loss: |model, device, _| {
            let (tokens, classes) = (ints([4, 6], VOCABULARY, device), ints([24], VOCABULARY, device));
            let hidden = model.forward(tokens).tanh().reshape([24, HIDDEN]);
            let logits = hidden.matmul(model.weight.val().transpose());
            CrossEntropyLossConfig::new().with_smoothing(None).init(&logits.device()).forward(logits, classes)
        },
    };
    for layout in ["TP1", "TP2", "TP4"] {
        let report = case.check(layout, &Plan::auto());
        assert!(report.fallbacks.is_empty() && report.times("all-gather") == 0, "{layout}: {report}");
    }
}
