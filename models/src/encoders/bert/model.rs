//! The model, as one writes it with Burn for one device.

use backend_dist::parallelize::Plan;
use burn::module::{Module, Param};
use burn::nn::activation::ActivationConfig;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::nn::transformer::{PositionWiseFeedForward, PositionWiseFeedForwardConfig};
use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::tensor::{Device, Int, Tensor};

use super::config::BertConfig;
use crate::activation::Activation;
use crate::encoders::{Padding, cross_entropy};

/// An encoder, as a rule with the head of a masked language model, and perhaps that of next-sentence prediction.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use models::{Bert, BertConfig};
///
/// let device = Device::flex();
/// let config = BertConfig { vocab_size: 40, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, ..BertConfig::base() };
/// let model = Bert::new(&config, &device);
/// let tokens = Tensor::<2, Int>::from_data([[2, 7, 4, 9, 3]], &device);
/// let hidden = model.encode(tokens, None, None);
/// assert_eq!(model.logits(hidden).dims(), [1, 5, 40]);
/// ```
#[derive(Module, Debug)]
pub struct Bert {
    /// Of tokens, positions and kinds of tokens.
    pub embeddings: BertEmbeddings,
    /// The encoder's layers.
    pub layers: Vec<BertLayer>,
    /// What is predicted at masked positions.
    pub predictions: Option<BertPredictions>,
    /// Of the first token, for next-sentence prediction and for what one makes of a model without heads.
    pub pooler: Option<Linear>,
    /// Whether the second sentence follows the first.
    pub next_sentence: Option<Linear>,
}

/// The sum of three embeddings, normalized.
#[derive(Module, Debug)]
pub struct BertEmbeddings {
    /// `[vocabulary, hidden]`; also what the head multiplies by.
    pub words: Embedding,
    /// `[longest sequence, hidden]`.
    pub positions: Embedding,
    /// `[kinds, hidden]`.
    pub types: Embedding,
    /// Of the sum.
    pub norm: LayerNorm,
    /// After the norm.
    pub dropout: Dropout,
}

/// Attention and a feed-forward network, with a norm after each residual sum.
#[derive(Module, Debug)]
pub struct BertLayer {
    /// Every token to every other that is no padding.
    pub attention: MultiHeadAttention,
    /// Of its sum.
    pub attention_norm: LayerNorm,
    /// Of each token: Burn's type, which [`Plan::auto`] knows, for its two layers.
    pub feed_forward: PositionWiseFeedForward,
    /// Of its sum.
    pub feed_forward_norm: LayerNorm,
    /// Between the layers of `feed_forward`.
    #[module(skip)]
    pub activation: Activation,
    /// Of what is added.
    pub dropout: Dropout,
}

/// What a masked token was: a layer, and a GEMM with the embedding of tokens.
#[derive(Module, Debug)]
pub struct BertPredictions {
    /// `[hidden, hidden]`.
    pub dense: Linear,
    /// After it.
    #[module(skip)]
    pub activation: Activation,
    /// After that.
    pub norm: LayerNorm,
    /// `[vocabulary]`.
    pub bias: Param<Tensor<1>>,
}

impl Bert {
    /// A model with random weights.
    pub fn new(config: &BertConfig, device: &Device) -> Self {
        let hidden = config.hidden_size;
        let normal = Initializer::Normal { mean: 0.0, std: config.initializer_range };
        let linear = |out: usize| LinearConfig::new(hidden, out).with_initializer(normal.clone()).init(device);
        let embedding =
            |count: usize| EmbeddingConfig::new(count, hidden).with_initializer(normal.clone()).init(device);
        let norm = || LayerNormConfig::new(hidden).with_epsilon(config.layer_norm_eps).init(device);
        let dropout = || DropoutConfig::new(config.hidden_dropout_prob).init();
        let layer = |_| BertLayer {
            attention: MultiHeadAttentionConfig::new(hidden, config.num_attention_heads)
                .with_dropout(config.attention_probs_dropout_prob)
                .with_initializer(normal.clone())
                .init(device),
            attention_norm: norm(),
            feed_forward: PositionWiseFeedForwardConfig::new(hidden, config.intermediate_size)
                .with_dropout(0.0)
                .with_initializer(normal.clone())
                .with_activation(ActivationConfig::Identity)
                .init(device),
            feed_forward_norm: norm(),
            activation: config.hidden_act,
            dropout: dropout(),
        };
        Self {
            embeddings: BertEmbeddings {
                words: embedding(config.vocab_size),
                positions: embedding(config.max_position_embeddings),
                types: embedding(config.type_vocab_size),
                norm: norm(),
                dropout: dropout(),
            },
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            predictions: config.predictions.then(|| BertPredictions {
                dense: linear(hidden),
                activation: config.hidden_act,
                norm: norm(),
                bias: Initializer::Zeros.init([config.vocab_size], device),
            }),
            pooler: (config.next_sentence || config.pooler).then(|| linear(hidden)),
            next_sentence: config.next_sentence.then(|| linear(2)),
        }
    }

    /// What tensor parallelism shards: attention, feed-forward networks and the embedding of tokens by burn-nn's types; the
    /// small embeddings stay whole.
    pub fn plan() -> Plan {
        Plan::auto().replicate("embeddings.positions|embeddings.types")
    }

    /// Hidden states `[batch, sequence, hidden]` of tokens `[batch, sequence]`. `types` says of which sentence a token is
    /// (all of the first, if not given), `padding` which tokens are none.
    pub fn encode(&self, tokens: Tensor<2, Int>, types: Option<Tensor<2, Int>>, padding: Padding) -> Tensor<3> {
        let x = self.embeddings.forward(tokens, types);
        self.layers.iter().fold(x, |x, layer| layer.forward(x, padding.clone()))
    }

    /// Logits `[batch, sequence, vocabulary]` of what each token is.
    ///
    /// # Panics
    /// If the model does not have that head.
    pub fn logits(&self, hidden: Tensor<3>) -> Tensor<3> {
        let predictions = self.predictions.as_ref().expect("a BERT with the head of a masked language model");
        predictions.forward(hidden, self.embeddings.words.weight.val())
    }

    /// `[batch, hidden]` of the first token, if there is a pooler.
    pub fn pool(&self, hidden: Tensor<3>) -> Option<Tensor<2>> {
        let first = hidden.narrow(1, 0, 1).squeeze_dim::<2>(1);
        self.pooler.as_ref().map(|pooler| pooler.forward(first).tanh())
    }

    /// Logits `[batch, 2]` of whether the second sentence follows (0) or does not (1), if the model has that head.
    pub fn next_sentence_logits(&self, hidden: Tensor<3>) -> Option<Tensor<2>> {
        Some(self.next_sentence.as_ref()?.forward(self.pool(hidden)?))
    }

    /// The mean loss of masked tokens, and that of next sentences if there are any: `logits` and `labels` as in
    /// [`cross_entropy`], relations `[batch, 2]` and `[batch]`.
    pub fn loss(
        logits: Tensor<3>,
        labels: Tensor<2, Int>,
        next_sentence: Option<(Tensor<2>, Tensor<1, Int>)>,
    ) -> Tensor<1> {
        let loss = cross_entropy(logits, labels);
        match next_sentence {
            Some((logits, labels)) => loss + cross_entropy(logits.unsqueeze_dim(1), labels.unsqueeze_dim(1)),
            None => loss,
        }
    }
}

impl BertEmbeddings {
    /// `[batch, sequence, hidden]`.
    pub fn forward(&self, tokens: Tensor<2, Int>, types: Option<Tensor<2, Int>>) -> Tensor<3> {
        let ([_, length], device) = (tokens.dims(), tokens.device());
        let positions = Tensor::<1, Int>::arange(0..length as i64, &device).unsqueeze_dim::<2>(0);
        let types = types.unwrap_or_else(|| tokens.zeros_like());
        let x = self.words.forward(tokens) + self.types.forward(types) + self.positions.forward(positions);
        self.dropout.forward(self.norm.forward(x))
    }
}

impl BertLayer {
    /// From and to `[batch, sequence, hidden]`; `padding [batch, sequence]`.
    pub fn forward(&self, x: Tensor<3>, padding: Padding) -> Tensor<3> {
        let mut input = MhaInput::self_attn(x.clone());
        if let Some(padding) = padding {
            input = input.mask_pad(padding);
        }
        let attended = self.dropout.forward(self.attention.forward(input).context);
        let x = self.attention_norm.forward(x + attended);
        let inner = self.activation.apply(self.feed_forward.linear_inner.forward(x.clone()));
        let computed = self.dropout.forward(self.feed_forward.linear_outer.forward(inner));
        self.feed_forward_norm.forward(x + computed)
    }
}

impl BertPredictions {
    /// Logits `[batch, sequence, vocabulary]`; `words [vocabulary, hidden]`.
    pub fn forward(&self, hidden: Tensor<3>, words: Tensor<2>) -> Tensor<3> {
        let x = self.norm.forward(self.activation.apply(self.dense.forward(hidden)));
        x.matmul(words.transpose().unsqueeze_dim::<3>(0)) + self.bias.val().unsqueeze::<3>()
    }
}
