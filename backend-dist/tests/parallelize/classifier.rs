//! A classifier of texts as Burn's users build it.

use crate::harness::{Case, LAYOUTS, ints};
use backend_dist::logical::Placement::Shard;
use backend_dist::mesh::Axis;
use backend_dist::mesh_backend::Redistribute;
use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::tensor::{Bool, Device, Int, Tensor};

#[derive(Module, Debug)]
struct Classifier {
    encoder: TransformerEncoder,
    tokens: Embedding,
    positions: Embedding,
    output: Linear,
}

impl Classifier {
    fn new(device: &Device) -> Self {
        Self {
            encoder: TransformerEncoderConfig::new(16, 32, 4, 2).with_dropout(0.0).with_norm_first(true).init(device),
            tokens: EmbeddingConfig::new(40, 16).init(device),
            positions: EmbeddingConfig::new(8, 16).init(device),
            output: LinearConfig::new(16, 4).init(device),
        }
    }

    fn loss(&self, tokens: Tensor<2, Int>, labels: Tensor<1, Int>, padding: Tensor<2, Bool>) -> Tensor<1> {
        let [batch, length] = tokens.dims();
        let positions = Tensor::arange(0..length as i64, &tokens.device()).reshape([1, length]).repeat_dim(0, batch);
        let embedded = (self.positions.forward(positions) + self.tokens.forward(tokens)) / 2;
        let encoded = self.encoder.forward(TransformerEncoderInput::new(embedded).mask_pad(padding));
        let logits = self.output.forward(encoded).slice([0..batch, 0..1]).reshape([batch, 4]);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
    }
}

fn inputs(device: &Device) -> (Tensor<2, Int>, Tensor<1, Int>, Tensor<2, Bool>) {
    let device = &device.clone();
    (ints([4, 8], 40, device), ints([4], 4, device), ints([4, 8], 5, device).equal_elem(1))
}

#[test]
fn a_classifier_of_texts() {
    let case = Case::<Classifier> {
        init: Classifier::new,
        loss: |model, device, _| {
            let (tokens, labels, padding) = inputs(device);
            model.loss(tokens, labels, padding)
        },
    };
    for layout in LAYOUTS {
        let report = case.check(layout, &Plan::auto());
        assert!(report.fallbacks.is_empty(), "{layout}: {report}");
        // By columns and rows of one's own, too.
        case.check(layout, &Plan::auto().columns("output").replicate("positions"));
    }
}

#[test]
fn a_classifier_of_texts_sharded_by_sequence() {
    let case = Case::<Classifier> {
        init: Classifier::new,
        loss: |model, device, rank| {
            let (mut tokens, labels, padding) = inputs(device);
            if let Some(rank) = rank {
                tokens = tokens.redistribute(rank, Axis::Tp, Shard(1));
            }
            model.loss(tokens, labels, padding)
        },
    };
    for layout in LAYOUTS {
        case.check(layout, &Plan::auto());
    }
}
