//! GPT's forward pass.

use std::sync::Arc;

use backend_dist::shard::{Registry, Unit};
use burn::module::Module;
use burn::tensor::{Int, Tensor};

use super::config::GptConfig;
use crate::causal_lm::{CausalLm, ModelConfig};
use crate::layers::paged::{PagedKvCache, Step, column};
use crate::layers::{Dropout, LearnedPositions, Norm, NormKind, OutputLayer, TransformerBlock, VocabParallelEmbedding};
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ParamBuilder};
use crate::part::Part;

/// A rank's part of a GPT.
///
/// ```
/// use backend_dist::launch::{BoxError, Rank};
/// use burn::tensor::{Device, FloatDType, Int, Tensor};
/// use models::{CausalLm, Gpt, GptConfig, ParamBuilder};
///
/// let rank = Rank::single(Device::flex());
/// let model = Gpt::build(&GptConfig::tiny(), ParamBuilder::new(&rank, FloatDType::F32, 1))?;
/// let logits = model.logits(Tensor::<2, Int>::from_data([[1, 2, 3]], &rank.device));
/// assert_eq!(logits.dims(), [1, 3, 256]);
/// # Ok::<(), BoxError>(())
/// ```
#[derive(Module, Debug)]
pub struct Gpt {
    embedding: Option<Embedding>,
    layers: Vec<TransformerBlock>,
    head: Option<Head>,
    #[module(skip)]
    dropout: Dropout,
    #[module(skip)]
    part: Part,
    #[module(skip)]
    registry: Arc<Registry>,
}

#[derive(Module, Debug)]
struct Embedding {
    tokens: VocabParallelEmbedding,
    positions: LearnedPositions,
}

#[derive(Module, Debug)]
struct Head {
    norm: Norm,
    lm_head: OutputLayer,
}

impl CausalLm for Gpt {
    type Config = GptConfig;

    fn build(config: &GptConfig, mut params: ParamBuilder) -> Result<Self, BuildError> {
        config.check_for(&params)?;
        let params = &mut params;
        let (init, part) = (config.init(), params.part_of(config.num_hidden_layers));
        let (positions, eps) = (config.max_position_embeddings, config.layer_norm_epsilon);
        let vocab = config.vocab();
        let embedding = match part.embedding {
            true => {
                params.begin(if config.tie_word_embeddings { Unit::Tied } else { Unit::Embedding });
                let tokens = VocabParallelEmbedding::new(params, "embed_tokens", &vocab, init)?;
                params.begin(Unit::Embedding);
                let positions = LearnedPositions::new(params, "embed_positions", positions, vocab.hidden, init)?;
                Some(Embedding { tokens, positions })
            }
            false => None,
        };
        let block = config.block();
        let layer = |index| {
            params.begin(Unit::Layer(index));
            TransformerBlock::new(params, &format!("layers.{index}"), &block)
        };
        let layers = part.layers.clone().map(layer).collect::<Result<_, _>>()?;
        params.begin(Unit::Head);
        let head = match part.head {
            true => Some(Head {
                norm: Norm::new(params, "norm", vocab.hidden, NormKind::Layer, eps)?,
                lm_head: match config.tie_word_embeddings {
                    true => OutputLayer::tied(params, "embed_tokens", &vocab, init)?,
                    false => OutputLayer::untied(params, "lm_head", &vocab, init)?,
                },
            }),
            false => None,
        };
        Ok(Self {
            embedding,
            layers,
            head,
            dropout: Dropout::new(params.parallel(), "embed_tokens", config.hidden_dropout),
            part,
            registry: Arc::new(params.take_registry()),
        })
    }

    fn part(&self) -> &Part {
        &self.part
    }

    fn embed(&self, tokens: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<3> {
        let embedding = self.embedding();
        let x = embedding.positions.forward(embedding.tokens.forward(tokens.transpose()), batch);
        self.dropout.forward(x, batch)
    }

    fn layer(&self, index: usize, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        self.layers[index - self.part.layers.start].forward(x, None, batch)
    }

    fn head_losses(&self, x: Tensor<3>, labels: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<2> {
        let Head { norm, lm_head } = self.head();
        lm_head.token_losses(norm.forward(x), labels.transpose(), self.table(), batch).transpose()
    }

    fn head_logits(&self, x: Tensor<3>) -> Tensor<3> {
        let Head { norm, lm_head } = self.head();
        lm_head.logits(norm.forward(x), self.table()).swap_dims(0, 1)
    }

    fn extend_embed(&self, step: &Step) -> Tensor<3> {
        let Embedding { tokens, positions } = self.embedding();
        let x = tokens.extend(column(&step.tokens(), &tokens.device()));
        positions.extend(x, &step.positions())
    }

    fn extend_layer(&self, index: usize, x: Tensor<3>, step: &Step, cache: &mut PagedKvCache) -> Tensor<3> {
        self.layers[index - self.part.layers.start].extend(x, step, None, (index, cache))
    }

    fn extend_head(&self, x: Tensor<3>, step: &Step) -> Tensor<2> {
        let Head { norm, lm_head } = self.head();
        lm_head.logits_of(norm.forward(x), &step.outputs(), self.table())
    }

    fn registry(&self) -> &Registry {
        &self.registry
    }
}

impl Gpt {
    fn embedding(&self) -> &Embedding {
        self.embedding.as_ref().expect("only the first stage embeds tokens")
    }

    fn head(&self) -> &Head {
        self.head.as_ref().expect("only the last stage has the head")
    }

    fn table(&self) -> Option<&VocabParallelEmbedding> {
        self.embedding.as_ref().map(|embedding| &embedding.tokens)
    }
}
