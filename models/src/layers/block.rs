//! A transformer block: norm, attention or another token mixer, norm, residual; norm, MLP, norm, residual. Not every
//! block has all norms.

use backend_dist::ops::Residual;
use burn::module::Module;
use burn::tensor::Tensor;

use super::attention::AttentionConfig;
use super::dropout::Dropout;
use super::feed_forward::FeedForward;
use super::frequencies::RopeConfig;
use super::mixer::{Mixer, TokenMixer};
use super::moe::Ffn;
use super::norm::{Norm, NormKind};
use super::paged::{Decode, PagedKvCache, Step};
use super::rope::Angles;
use super::row_linear::Summand;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result};

/// Where a block's norms are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormPlacement {
    /// Before attention and MLP (Llama).
    #[default]
    Before,
    /// After attention and MLP, before their outputs are added to the residual stream (OLMo 2).
    After,
    /// Before and after both (Gemma 2, GLM-4).
    Both,
}

impl NormPlacement {
    /// Whether attention and MLP read normalised activations.
    pub fn is_before(self) -> bool {
        self != Self::After
    }

    /// Whether the outputs of attention and MLP are normalised.
    pub fn is_after(self) -> bool {
        self != Self::Before
    }

    /// Our names of the norms that a block has, in the order in which it computes them, each with its place among all
    /// four.
    pub fn names(self) -> impl Iterator<Item = (usize, &'static str)> {
        let has = move |place: usize| if place.is_multiple_of(2) { self.is_before() } else { self.is_after() };
        NORMS.into_iter().enumerate().filter(move |(place, _)| has(*place))
    }
}

/// Before attention, after it, before the MLP, after it.
const NORMS: [&str; 4] =
    ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"];

/// Everything a block is made of.
#[derive(Clone, Copy, Debug)]
pub struct BlockConfig {
    /// Attention, or what is in its place; a layer of a hybrid may have an MLP alone (Nemotron-H).
    pub mixer: Option<Mixer>,
    /// MLP or MoE; Mamba-2 has none.
    pub mlp: Option<Ffn>,
    /// Which norms.
    pub norm: NormKind,
    /// Where they are.
    pub placement: NormPlacement,
    /// Epsilon of the norms.
    pub norm_eps: f64,
    /// Share of the elements that are dropped before each residual addition.
    pub dropout: f64,
}

impl BlockConfig {
    /// Attention, if the block has it.
    pub fn attention(&self) -> Option<&AttentionConfig> {
        self.mixer.as_ref().and_then(Mixer::attention)
    }

    /// The rotation of queries and keys, if they are rotated.
    pub fn rope(&self) -> Option<RopeConfig> {
        self.mixer.as_ref().and_then(Mixer::rope)
    }

    /// Features in and out.
    ///
    /// # Panics
    /// For a block of nothing.
    pub fn hidden(&self) -> usize {
        match (&self.mixer, &self.mlp) {
            (Some(mixer), _) => mixer.hidden(),
            (None, Some(mlp)) => mlp.hidden(),
            (None, None) => panic!("a block has a mixer or an MLP"),
        }
    }

    /// Our names of the norms that the block has, each with its place among all four ([`NormPlacement::names`]).
    pub fn norms(&self) -> impl Iterator<Item = (usize, &'static str)> {
        let has = [self.mixer.is_some(), self.mlp.is_some()];
        self.placement.names().filter(move |(place, _)| has[place / 2])
    }
}

/// One layer of a decoder. Activations between its parts are `[s, b, hidden]`, under sequence parallelism
/// `[s/tp, b, hidden]`.
#[derive(Module, Debug)]
pub struct TransformerBlock {
    input_layernorm: Norm,
    mixer: Option<TokenMixer>,
    post_self_attn_layernorm: Norm,
    post_attention_layernorm: Norm,
    mlp: Option<FeedForward>,
    post_mlp_layernorm: Norm,
    #[module(skip)]
    mixer_dropout: Dropout,
    #[module(skip)]
    mlp_dropout: Dropout,
}

impl TransformerBlock {
    /// A block under the global name `name`, for example `layers.0`.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &BlockConfig) -> Result<Self> {
        let hidden = config.hidden();
        let mixer = config.mixer.as_ref().map_or(String::new(), |mixer| format!("{name}.{}", mixer.name()));
        let mlp = format!("{name}.mlp");
        let parallel = params.parallel().clone();
        let norm = |params: &mut ParamBuilder, place: usize| match config.norms().find(|(at, _)| *at == place) {
            Some((_, norm)) => Norm::new(params, &format!("{name}.{norm}"), hidden, config.norm, config.norm_eps),
            None => Ok(Norm::none()),
        };
        Ok(Self {
            input_layernorm: norm(params, 0)?,
            mixer: config.mixer.as_ref().map(|config| TokenMixer::new(params, &mixer, config)).transpose()?,
            post_self_attn_layernorm: norm(params, 1)?,
            post_attention_layernorm: norm(params, 2)?,
            mlp: config.mlp.as_ref().map(|config| FeedForward::new(params, &mlp, config)).transpose()?,
            post_mlp_layernorm: norm(params, 3)?,
            mixer_dropout: Dropout::new(&parallel, &mixer, config.dropout),
            mlp_dropout: Dropout::new(&parallel, &mlp, config.dropout),
        })
    }

    /// The block's output; see [`SelfAttention::forward`](super::attention::SelfAttention::forward) for `angles`.
    pub fn forward(&self, x: Tensor<3>, angles: Option<&Angles>, batch: &MicroBatch) -> Tensor<3> {
        let mlp = |mlp: &FeedForward, x, norm: &Norm| mlp.forward(x, norm, batch);
        let x = Residual::enter(x, &batch.pass);
        let (x, last) = self.around(x, batch, |mixer, x, norm| mixer.forward(x, norm, angles, batch), mlp);
        x.leave(last)
    }

    /// The same for tokens of several sequences; see [`SelfAttention::extend`](super::attention::SelfAttention::extend).
    pub fn extend(
        &self,
        x: Tensor<3>,
        step: &Step,
        angles: Option<&Angles>,
        cache: (usize, &mut PagedKvCache),
    ) -> Tensor<3> {
        let batch = &MicroBatch::default();
        let mlp = |mlp: &FeedForward, x, norm: &Norm| mlp.forward(x, norm, batch);
        let x = Residual::enter(x, &batch.pass);
        let (x, last) = self.around(x, batch, |mixer, x, norm| mixer.extend(x, norm, step, angles, cache), mlp);
        x.leave(last)
    }

    /// The same for a decode step on a GPU; see [`SelfAttention::decode`].
    pub(crate) fn decode(&self, x: Decoded, step: (usize, &Decode), angles: Option<&Angles>) -> Decoded {
        let x = match &self.mixer {
            Some(mixer) => {
                let norms = [&self.input_layernorm, &self.post_self_attn_layernorm];
                x.through(norms, mixer.first_weight(), |x, norm| mixer.decode(x, norm, step, angles))
            }
            None => x,
        };
        match &self.mlp {
            Some(mlp) => {
                let norms = [&self.post_attention_layernorm, &self.post_mlp_layernorm];
                x.through(norms, mlp.first_weight(), |x, norm| mlp.decode(x, norm))
            }
            None => x,
        }
    }

    /// Whether nothing in a decode step of so many tokens waits for the host, and its attention has a kernel.
    pub(crate) fn decodes(&self, layer: usize, tokens: usize, cache: &PagedKvCache) -> bool {
        self.mlp.as_ref().is_none_or(|mlp| mlp.decodes(tokens))
            && self.mixer.as_ref().is_none_or(|mixer| mixer.decodes(layer, cache))
    }

    /// The residual stream before the output of the block's last part is added, and that.
    fn around(
        &self,
        x: Residual,
        batch: &MicroBatch,
        mixer: impl FnOnce(&TokenMixer, Residual, &Norm) -> Tensor<3>,
        mlp: impl FnOnce(&FeedForward, Residual, &Norm) -> Tensor<3>,
    ) -> (Residual, Tensor<3>) {
        let mixed = self.mixer.as_ref().map(|of| {
            let mixed = self.post_self_attn_layernorm.forward(mixer(of, x.clone(), &self.input_layernorm));
            self.mixer_dropout.forward(mixed, batch)
        });
        let (x, of) = match (mixed, &self.mlp) {
            (Some(mixed), Some(of)) => (self.post_attention_layernorm.of_sum(x, mixed), of),
            (Some(mixed), None) => return (x, mixed),
            (None, of) => (x, of.as_ref().expect("a block has a mixer or an MLP")),
        };
        let mlp = mlp(of, x.clone(), &self.post_attention_layernorm);
        let mlp = self.post_mlp_layernorm.forward(mlp);
        (x, self.mlp_dropout.forward(mlp, batch))
    }
}

/// The activations between the parts of a decode step: the norm that reads them next adds the last part's output.
pub(crate) struct Decoded {
    /// The residual stream.
    x: Residual,
    /// What is to be added to it.
    last: Option<Summand>,
}

impl Decoded {
    /// Of the embedding.
    pub fn embedded(x: Tensor<3>) -> Self {
        Self { x: x.into(), last: None }
    }

    /// The residual stream, whose next reader is `norm`, and behind that the weight `next`.
    pub fn read_by(self, norm: &Norm, next: Option<Tensor<2>>) -> Residual {
        match self.last {
            None => self.x,
            Some(last) => last.onto(self.x, norm, next),
        }
    }

    /// After a part of a block between two norms, which reads the weight `first` first.
    fn through(
        self,
        [before, after]: [&Norm; 2],
        first: Option<Tensor<2>>,
        part: impl FnOnce(Residual, &Norm) -> Summand,
    ) -> Self {
        let x = self.read_by(before, first);
        Self { last: Some(part(x.clone(), before).normed(after)), x }
    }
}
