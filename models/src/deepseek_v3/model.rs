//! DeepSeek-V3's forward pass.

use std::sync::Arc;

use backend_dist::shard::{Registry, Unit};
use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::block::LatentBlock;
use super::config::DeepSeekV3Config;
use super::mtp::Predictors;
use crate::causal_lm::{CausalLm, ModelConfig};
use crate::layers::paged::{PagedKvCache, Step, column};
use crate::layers::{
    Angles, Norm, NormKind, OutputLayer, RotaryEmbedding, Vocab, VocabParallelEmbedding, with_mtp_losses,
};
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ParamBuilder, TensorParallel};
use crate::part::Part;

/// A rank's part of a DeepSeek-V3.
#[derive(Module, Debug)]
pub struct DeepSeekV3 {
    embed_tokens: Option<VocabParallelEmbedding>,
    layers: Vec<LatentBlock>,
    head: Option<Head>,
    #[module(skip)]
    mtp_weight: f64,
    #[module(skip)]
    rope: RotaryEmbedding,
    #[module(skip)]
    parallel: TensorParallel,
    #[module(skip)]
    part: Part,
    #[module(skip)]
    registry: Arc<Registry>,
}

#[derive(Module, Debug)]
struct Head {
    norm: Norm,
    lm_head: OutputLayer,
    mtp: Option<Predictors>,
}

impl CausalLm for DeepSeekV3 {
    type Config = DeepSeekV3Config;

    fn build(config: &DeepSeekV3Config, mut params: ParamBuilder) -> Result<Self, BuildError> {
        config.check_for(&params)?;
        let params = &mut params;
        let (init, part) = (config.init(), params.part_of(config.num_hidden_layers));
        let vocab =
            Vocab { size: config.vocab_size, hidden: config.hidden_size, divisor: config.make_vocab_size_divisible_by };
        // The modules of multi-token prediction embed tokens too.
        params.begin(if config.num_nextn_predict_layers > 0 { Unit::Tied } else { Unit::Embedding });
        let embed_tokens = match part.embedding {
            true => Some(VocabParallelEmbedding::new(params, "embed_tokens", &vocab, init)?),
            false => None,
        };
        let layer = |index| {
            params.begin(Unit::Layer(index));
            LatentBlock::new(params, &format!("layers.{index}"), &config.block(index))
        };
        let layers = part.layers.clone().map(layer).collect::<Result<_, _>>()?;
        params.begin(Unit::Head);
        let head = match part.head {
            true => Some(Head {
                norm: Norm::new(params, "norm", vocab.hidden, NormKind::Rms, config.rms_norm_eps)?,
                lm_head: OutputLayer::untied(params, "lm_head", &vocab, init)?,
                mtp: Predictors::new(params, config, &vocab)?,
            }),
            false => None,
        };
        Ok(Self {
            embed_tokens,
            layers,
            head,
            mtp_weight: config.mtp_loss_scaling_factor / config.num_nextn_predict_layers.max(1) as f64,
            rope: RotaryEmbedding::new(&config.rope()),
            parallel: params.parallel().clone(),
            part,
            registry: Arc::new(params.take_registry()),
        })
    }

    fn part(&self) -> &Part {
        &self.part
    }

    fn embed(&self, tokens: Tensor<2, Int>, _batch: &MicroBatch) -> Tensor<3> {
        self.embedding().forward(tokens.transpose())
    }

    fn layer(&self, index: usize, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        let angles = self.angles(&x, batch);
        self.layers[index - self.part.layers.start].forward(x, &angles, batch)
    }

    /// The losses of the next token. Their gradient includes the losses of the modules of multi-token
    /// prediction ([`with_mtp_losses`]); without gradients those are not computed.
    fn head_losses(&self, x: Tensor<3>, labels: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<2> {
        let Head { norm, lm_head, .. } = self.head();
        let x = norm.forward(x);
        let losses = lm_head.token_losses(x.clone(), labels.clone().transpose(), None, batch).transpose();
        match x.is_autodiff() {
            true => {
                let modules = self.further_losses(x, &labels, &batch.as_first_pass());
                with_mtp_losses(losses, modules, self.mtp_weight, batch)
            }
            false => losses,
        }
    }

    fn head_logits(&self, x: Tensor<3>) -> Tensor<3> {
        let Head { norm, lm_head, .. } = self.head();
        lm_head.logits(norm.forward(x), None).swap_dims(0, 1)
    }

    fn extend_embed(&self, step: &Step) -> Tensor<3> {
        self.embedding().extend(column(&step.tokens(), &self.embedding().device()))
    }

    fn extend_layer(&self, index: usize, x: Tensor<3>, step: &Step, cache: &mut PagedKvCache) -> Tensor<3> {
        let angles = self.rope.angles_of(step.positions(), x.dtype(), &x.device());
        self.layers[index - self.part.layers.start].extend(x, step, &angles, (index, cache))
    }

    fn extend_head(&self, x: Tensor<3>, step: &Step) -> Tensor<2> {
        let Head { norm, lm_head, .. } = self.head();
        lm_head.logits_of(norm.forward(x), &step.outputs(), None)
    }

    fn registry(&self) -> &Registry {
        &self.registry
    }
}

impl DeepSeekV3 {
    /// The losses of the modules of multi-token prediction, `[b, s]` each, from the activations after the last layer.
    /// The `k`-th module's, counted from 1, at position `i` is `-log p(labels[b, i + k])`, and is meaningless where
    /// the sequence ends before.
    ///
    /// # Panics
    /// If the part does not end with the head.
    pub fn mtp_losses(&self, x: Tensor<3>, labels: &Tensor<2, Int>, batch: &MicroBatch) -> Vec<Tensor<2>> {
        self.further_losses(self.head().norm.forward(x), labels, batch)
    }

    /// [`mtp_losses`](Self::mtp_losses) from normalised activations.
    fn further_losses(&self, x: Tensor<3>, labels: &Tensor<2, Int>, batch: &MicroBatch) -> Vec<Tensor<2>> {
        let Head { lm_head, mtp, .. } = self.head();
        let Some(mtp) = mtp else { return Vec::new() };
        let angles = self.angles(&x, batch);
        mtp.losses(x, labels, self.embed_tokens.as_ref(), lm_head, &angles, batch)
    }

    /// The angles of the positions that activations `x` of the micro-batch are of.
    fn angles(&self, x: &Tensor<3>, batch: &MicroBatch) -> Angles {
        let [positions, samples, _] = x.dims();
        let positions = self.parallel.sequence_length(positions);
        self.rope.of_positions(batch, [positions, samples], x.dtype(), &x.device())
    }

    fn embedding(&self) -> &VocabParallelEmbedding {
        self.embed_tokens.as_ref().expect("only the first stage embeds tokens")
    }

    fn head(&self) -> &Head {
        self.head.as_ref().expect("only the last stage has the head")
    }
}
