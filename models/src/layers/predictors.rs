//! Modules of multi-token prediction (DeepSeek-V3, GLM-4.5, Qwen3-Next): from the last hidden states to the tokens after
//! the next one.

use backend_dist::shard::{Init, Unit};
use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::block::{BlockConfig, TransformerBlock};
use super::embedding::{Vocab, VocabParallelEmbedding};
use super::mtp::{MtpProjection, ahead, with_mtp_losses};
use super::norm::{Norm, NormKind};
use super::output::OutputLayer;
use super::rope::LayerRopes;
use crate::micro_batch::MicroBatch;
use crate::param::{ParamBuilder, Result, TensorParallel};

/// The modules. Embedding and output layer are the model's.
#[derive(Module, Debug)]
pub(crate) struct Predictors {
    /// A copy, where the embedding is on another pipeline stage.
    embed_tokens: Option<VocabParallelEmbedding>,
    modules: Vec<Predictor>,
    #[module(skip)]
    weight: f64,
    #[module(skip)]
    ropes: LayerRopes,
    #[module(skip)]
    parallel: TensorParallel,
}

/// One module.
#[derive(Module, Debug)]
struct Predictor {
    input: MtpProjection,
    block: TransformerBlock,
    norm: Norm,
}

impl Predictors {
    /// The modules of a model: layers after the last one, with blocks as `block` says. `weight` is that of each of their
    /// losses.
    pub fn new(
        params: &mut ParamBuilder,
        vocab: &Vocab,
        (init, norm, eps): (Init, NormKind, f64),
        layers: std::ops::Range<usize>,
        block: impl Fn(usize) -> BlockConfig,
        weight: f64,
    ) -> Result<Self> {
        let embed_tokens = match params.part().is_some_and(|part| !part.embedding) {
            true => {
                params.begin(Unit::Tied);
                Some(VocabParallelEmbedding::copy(params, "embed_tokens", vocab, init)?)
            }
            false => None,
        };
        let ropes = LayerRopes::new(layers.clone().map(|index| block(index).rope()));
        let module = |index: usize| {
            params.begin(Unit::Layer(index));
            let name = format!("layers.{index}");
            Ok(Predictor {
                input: MtpProjection::new(params, &name, vocab.hidden, (norm, eps), init)?,
                block: TransformerBlock::new(params, &name, &block(index))?,
                norm: Norm::new(params, &format!("{name}.shared_head.norm"), vocab.hidden, norm, eps)?,
            })
        };
        let modules = layers.map(module).collect::<Result<_>>()?;
        Ok(Self { embed_tokens, modules, weight, ropes, parallel: params.parallel().clone() })
    }

    /// `losses` of the next token, whose gradient also flows to those of the modules ([`with_mtp_losses`]).
    pub fn with_losses(&self, losses: Tensor<2>, of_modules: Vec<Tensor<2>>, batch: &MicroBatch) -> Tensor<2> {
        with_mtp_losses(losses, of_modules, self.weight, batch)
    }

    /// Losses `[b, s]` of every module: of module `k`, counted from 1, at position `i` for the token at `i + k` of
    /// `labels [b, s]`; meaningless where there is none. `x` are the normalised hidden states that the output layer
    /// gets.
    pub fn losses(
        &self,
        x: Tensor<3>,
        labels: &Tensor<2, Int>,
        embed_tokens: Option<&VocabParallelEmbedding>,
        lm_head: &OutputLayer,
        batch: &MicroBatch,
    ) -> Vec<Tensor<2>> {
        let own = self.embed_tokens.as_ref().or(embed_tokens);
        let embed_tokens = own.expect("the head's stage has the embedding or a copy of it");
        let positions = self.parallel.sequence_length(x.dims()[0]);
        let mut x = x;
        let module = |(index, module): (usize, &Predictor)| {
            let [tokens, targets] = ahead(labels.clone(), index + 1, batch);
            let embedded = embed_tokens.forward(tokens.transpose());
            let angles = self.ropes.angles(index, positions, &x, batch);
            let hidden = module.block.forward(module.input.forward(embedded, x.clone(), batch), angles.as_ref(), batch);
            x = module.norm.forward(hidden);
            lm_head.token_losses(x.clone(), targets.transpose(), None, batch).transpose()
        };
        self.modules.iter().enumerate().map(module).collect()
    }
}
