//! The forward pass of the families that are an embedding, blocks and a head.

use std::marker::PhantomData;
use std::sync::Arc;

use backend_dist::shard::{Registry, Unit};
use burn::module::Module;
use burn::tensor::{Int, Tensor};

use crate::causal_lm::CausalLm;
use crate::frame::{DecoderConfig, Frame};
use crate::hf::decoder::{self, USUAL};
use crate::layers::paged::{PagedKvCache, Step, column};
use crate::layers::{
    BlockConfig, Decoded, Dropout, LayerRopes, LearnedPositions, Norm, OutputLayer, Predictors, TransformerBlock,
    VocabParallelEmbedding,
};
use crate::megatron;
use crate::micro_batch::MicroBatch;
use crate::names::NameMap;
use crate::param::{ParamBuilder, Result, TensorParallel};
use crate::part::Part;

/// A rank's part of a model whose sizes are `C`: [`Llama`](crate::Llama), for example.
#[derive(Module, Debug)]
pub struct Decoder<C> {
    embed_tokens: Option<VocabParallelEmbedding>,
    embed_positions: Option<LearnedPositions>,
    layers: Vec<TransformerBlock>,
    head: Option<Head>,
    #[module(skip)]
    dropout: Dropout,
    #[module(skip)]
    embedding_scale: Option<f64>,
    #[module(skip)]
    ropes: LayerRopes,
    #[module(skip)]
    parallel: TensorParallel,
    #[module(skip)]
    part: Part,
    #[module(skip)]
    shares_prefixes: bool,
    #[module(skip)]
    registry: Arc<Registry>,
    #[module(skip)]
    family: PhantomData<fn() -> C>,
}

#[derive(Module, Debug)]
struct Head {
    norm: Norm,
    lm_head: OutputLayer,
    mtp: Option<Predictors>,
}

impl<C: DecoderConfig> CausalLm for Decoder<C> {
    type Config = C;

    fn build(config: &C, mut params: ParamBuilder) -> Result<Self> {
        config.check_for(&params)?;
        let params = &mut params;
        let frame @ Frame { vocab, init, .. } = config.frame();
        let part = params.part_of(frame.layers);
        let ropes = LayerRopes::new(part.layers.clone().map(|layer| config.block(layer).rope()));
        // Modules of multi-token prediction embed tokens too.
        params.begin(if frame.tied || frame.mtp.is_some() { Unit::Tied } else { Unit::Embedding });
        let embed_tokens = match part.embedding {
            true => Some(VocabParallelEmbedding::new(params, "embed_tokens", &vocab, init)?),
            false => None,
        };
        let embed_positions = match frame.positions.filter(|_| part.embedding) {
            Some(positions) => {
                params.begin(Unit::Embedding);
                Some(LearnedPositions::new(params, "embed_positions", positions, vocab.hidden, init)?)
            }
            None => None,
        };
        let layer = |index| {
            params.begin(Unit::Layer(index));
            TransformerBlock::new(params, &format!("layers.{index}"), &config.block(index))
        };
        let layers = part.layers.clone().map(layer).collect::<Result<_, _>>()?;
        params.begin(Unit::Head);
        let head = match part.head {
            true => Some(Head {
                norm: Norm::new(params, "norm", vocab.hidden, frame.norm, frame.norm_eps)?.times(frame.logit_scale),
                lm_head: match frame.tied {
                    true => OutputLayer::tied(params, "embed_tokens", &vocab, init)?,
                    false => OutputLayer::untied(params, "lm_head", &vocab, init)?,
                }
                .with_softcap(frame.logit_softcap),
                mtp: match frame.mtp {
                    Some(mtp) => {
                        let (init, layers) = ((init, frame.norm, frame.norm_eps), frame.layers..frame.all_layers());
                        Some(Predictors::new(params, &vocab, init, layers, |layer| config.block(layer), mtp.weight)?)
                    }
                    None => None,
                },
            }),
            false => None,
        };
        Ok(Self {
            embed_tokens,
            embed_positions,
            layers,
            head,
            dropout: Dropout::new(params.parallel(), "embed_tokens", frame.dropout),
            embedding_scale: frame.embedding_scale,
            ropes,
            parallel: params.parallel().clone(),
            part,
            shares_prefixes: config.unshared_prefixes().is_none(),
            registry: Arc::new(params.take_registry()),
            family: PhantomData,
        })
    }

    fn part(&self) -> &Part {
        &self.part
    }

    fn shares_prefixes(&self) -> bool {
        self.shares_prefixes
    }

    fn embed(&self, tokens: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<3> {
        let x = self.scaled(self.embedding().forward(tokens.transpose()));
        let x = match &self.embed_positions {
            Some(positions) => positions.forward(x, batch),
            None => x,
        };
        self.dropout.forward(x, batch)
    }

    fn layer(&self, index: usize, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let positions = self.parallel.sequence_length(x.dims()[0]);
        let index = index - self.part.layers.start;
        let angles = self.ropes.angles(index, positions, &x, batch);
        self.layers[index].forward(x, angles.as_ref(), batch)
    }

    /// The losses of the next token. Their gradient includes the losses of modules of multi-token prediction; without
    /// gradients those are not computed.
    fn head_losses(&self, x: Tensor<3>, labels: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<2> {
        let Head { norm, lm_head, mtp } = self.head();
        let (x, embedding) = (norm.forward(x), self.embed_tokens.as_ref());
        let losses =
            |x, labels: Tensor<2, Int>| lm_head.token_losses(x, labels.transpose(), embedding, batch).transpose();
        match mtp {
            Some(mtp) if x.is_autodiff() => {
                let next = losses(x.clone(), labels.clone());
                let further = mtp.losses(x, &labels, embedding, lm_head, &batch.as_first_pass());
                mtp.with_losses(next, further, batch)
            }
            _ => losses(x, labels),
        }
    }

    fn head_logits(&self, x: Tensor<3>) -> Tensor<3> {
        let Head { norm, lm_head, .. } = self.head();
        lm_head.logits(norm.forward(x), self.embed_tokens.as_ref()).swap_dims(0, 1)
    }

    fn extend(&self, step: &Step, cache: &mut PagedKvCache) -> Tensor<2> {
        cache.begin(step);
        if let Some(logits) = self.decode(step, cache) {
            return logits;
        }
        let x = self.extend_embed(step);
        let x = self.part.layers.clone().fold(x, |x, layer| self.extend_layer(layer, x, step, cache));
        self.extend_head(x, step)
    }

    fn extend_embed(&self, step: &Step) -> Tensor<3> {
        let embedding = self.embedding();
        let x = self.scaled(embedding.extend(column(&step.tokens(), &embedding.device())));
        match &self.embed_positions {
            Some(positions) => positions.extend(x, &step.positions()),
            None => x,
        }
    }

    fn extend_layer(&self, index: usize, x: Tensor<3>, step: &Step, cache: &mut PagedKvCache) -> Tensor<3> {
        let own = index - self.part.layers.start;
        let angles = self.ropes.of(own).map(|rope| rope.angles_of(step.positions(), x.dtype(), &x.device()));
        self.layers[own].extend(x, step, angles.as_ref(), (index, cache))
    }

    fn extend_head(&self, x: Tensor<3>, step: &Step) -> Tensor<2> {
        let Head { norm, lm_head, .. } = self.head();
        lm_head.logits_of(norm.forward(x), &step.outputs(), self.embed_tokens.as_ref())
    }

    fn registry(&self) -> &Registry {
        &self.registry
    }
}

impl Frame {
    /// Megatron-LM's names of a decoder of such blocks; `block` says what each layer is.
    pub fn megatron_names(&self, block: impl Fn(usize) -> BlockConfig) -> NameMap {
        megatron::names(self, block)
    }

    /// Hugging Face's names of a decoder of such blocks, as most of its families call them.
    pub fn hf_names(&self, block: impl Fn(usize) -> BlockConfig) -> NameMap {
        decoder::names(self, block, USUAL)
    }
}

impl<C: DecoderConfig> Decoder<C> {
    /// The losses of the modules of multi-token prediction, `[b, s]` each, from the activations after the last layer.
    /// The `k`-th module's, counted from 1, at position `i` is `-log p(labels[b, i + k])`, and is meaningless where
    /// the sequence ends before.
    ///
    /// # Panics
    /// If the part does not end with the head.
    pub fn mtp_losses(&self, x: Tensor<3>, labels: &Tensor<2, Int>, batch: &MicroBatch) -> Vec<Tensor<2>> {
        let Head { norm, lm_head, mtp } = self.head();
        let losses = |mtp: &Predictors| mtp.losses(norm.forward(x), labels, self.embed_tokens.as_ref(), lm_head, batch);
        mtp.as_ref().map_or_else(Vec::new, losses)
    }

    /// The logits of a decode step, if all of it can run on the GPU without the host.
    fn decode(&self, step: &Step, cache: &mut PagedKvCache) -> Option<Tensor<2>> {
        let (layers, tokens) = (self.layers.iter().enumerate(), PagedKvCache::decoded_tokens(step));
        let group = &self.parallel.group;
        // Ranks of one process would record while others call the driver.
        let may_record = group.size() == 1 || !group.is_in_one_process();
        let is_known = may_record && !self.parallel.sequence && self.embed_positions.is_none();
        if !is_known || !layers.clone().all(|(index, layer)| layer.decodes(index, tokens, cache)) {
            return None;
        }
        let embedding = self.embedding();
        cache.decode(step, &embedding.device(), |step| {
            let x = self.scaled(embedding.extend(step.tokens()));
            let dtype = x.dtype();
            let angles = self.ropes.map(|rope| step.angles(rope, dtype));
            let x = layers.clone().zip(angles).fold(Decoded::embedded(x), |x, ((index, layer), angles)| {
                layer.decode(x, (index, step), angles.as_ref())
            });
            let Head { norm, lm_head, .. } = self.head();
            lm_head.logits(norm.of_residual(x.read_by(norm, None)), self.embed_tokens.as_ref()).squeeze_dim(1)
        })
    }

    fn embedding(&self) -> &VocabParallelEmbedding {
        self.embed_tokens.as_ref().expect("only the first stage embeds tokens")
    }

    fn scaled(&self, x: Tensor<3>) -> Tensor<3> {
        match self.embedding_scale {
            Some(scale) => x.mul_scalar(scale),
            None => x,
        }
    }

    fn head(&self) -> &Head {
        self.head.as_ref().expect("only the last stage has the head")
    }
}
