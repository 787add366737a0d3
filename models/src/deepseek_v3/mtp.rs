//! DeepSeek-V3's modules of multi-token prediction: from the last hidden states to the tokens after the next one.

use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::block::LatentBlock;
use super::config::DeepSeekV3Config;
use crate::layers::{Angles, MtpProjection, Norm, NormKind, OutputLayer, Vocab, VocabParallelEmbedding, ahead};
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ParamBuilder};
use backend_dist::shard::Unit;

/// The modules. Embedding and output layer are the model's.
#[derive(Module, Debug)]
pub(super) struct Predictors {
    /// A copy, where the embedding is on another pipeline stage.
    embed_tokens: Option<VocabParallelEmbedding>,
    modules: Vec<Predictor>,
}

/// One module.
#[derive(Module, Debug)]
struct Predictor {
    input: MtpProjection,
    block: LatentBlock,
    norm: Norm,
}

impl Predictors {
    /// The modules of a model, none if it has none. Their parameters follow those of the last layer.
    pub fn new(
        params: &mut ParamBuilder,
        config: &DeepSeekV3Config,
        vocab: &Vocab,
    ) -> Result<Option<Self>, BuildError> {
        if config.num_nextn_predict_layers == 0 {
            return Ok(None);
        }
        let embed_tokens = match params.part().is_some_and(|part| !part.embedding) {
            true => {
                params.begin(Unit::Tied);
                Some(VocabParallelEmbedding::copy(params, "embed_tokens", vocab, config.init())?)
            }
            false => None,
        };
        let module = |index: usize| {
            let index = config.num_hidden_layers + index;
            params.begin(Unit::Layer(index));
            let (name, eps) = (format!("layers.{index}"), config.rms_norm_eps);
            Ok(Predictor {
                input: MtpProjection::new(params, &name, vocab.hidden, eps, config.init())?,
                block: LatentBlock::new(params, &name, &config.block(index))?,
                norm: Norm::new(params, &format!("{name}.shared_head.norm"), vocab.hidden, NormKind::Rms, eps)?,
            })
        };
        let modules = (0..config.num_nextn_predict_layers).map(module).collect::<Result<_, BuildError>>()?;
        Ok(Some(Self { embed_tokens, modules }))
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
        angles: &Angles,
        batch: &MicroBatch,
    ) -> Vec<Tensor<2>> {
        let own = self.embed_tokens.as_ref().or(embed_tokens);
        let embed_tokens = own.expect("the head's stage has the embedding or a copy of it");
        let mut x = x;
        let module = |(index, module): (usize, &Predictor)| {
            let embedded = embed_tokens.forward(ahead(labels.clone(), index, batch.context.as_ref()).transpose());
            let hidden = module.block.forward(module.input.forward(embedded, x.clone(), batch), angles, batch);
            x = module.norm.forward(hidden);
            let targets = ahead(labels.clone(), index + 1, batch.context.as_ref());
            lm_head.token_losses(x.clone(), targets.transpose(), None, batch).transpose()
        };
        self.modules.iter().enumerate().map(module).collect()
    }
}
