//! A run as the planner sees it.

use backend_dist::ops::LOGITS_AT_ONCE;
use models::layers::{NormOver, NormPlacement};
use models::nemotron_h::HybridLayer;
use models::{FamilyConfig, LlamaConfig, Mamba2Config, MixtralConfig, NemotronHConfig};

use super::model::hf_config;
use super::problem::{ConfigErrors, Problem};
use super::run::RunConfig;
use crate::flops::FlopShape;
use crate::optim::{OptimizerConfig, StateDtype};
use crate::plan::gpus::GPUS;
use crate::plan::{
    Adapters, Completions, Decoder, Experts, Job, Latent, Linear, LossOf, Moments, PostTraining, StateBytes, StateSpace,
};

impl RunConfig {
    /// The run as [`plan`](crate::plan) sees it, on CPU ranks, independent of data and files.
    ///
    /// # Errors
    /// An illegal layout or batch, with the nearest legal one.
    pub fn job(&self) -> Result<Job, ConfigErrors> {
        let (training, layout, performance) = (&self.training, &self.parallel, &self.performance);
        ConfigErrors::from_problems(self.layout_problems())?;
        let problem = |what: String| ConfigErrors(vec![Problem::new(what)]);
        let decoder = Decoder::from(&self.model.config);
        let batches = self.engine().plan(layout.dp).map_err(|error| problem(format!("training: {error}")))?;
        let (schedule, stages) = (self.pipeline.resolve(layout, decoder.layers, batches.accumulation))
            .map_err(|error| problem(format!("pipeline: {error}")))?;
        let (matrices, others) = self.optimizer.moments();
        let states = self.optimizer.states();
        let newton_schulz = match self.optimizer {
            OptimizerConfig::Muon(muon) => Some(muon.ns_steps),
            _ => None,
        };
        Ok(Job {
            fp8: self.fp8.layers(decoder.layers),
            fp8_weights: self.fp8.keep_weights,
            // Experts with biases stay in the type of training.
            fp8_experts: self.fp8.experts && decoder.experts.as_ref().is_none_or(|experts| !experts.biases),
            decoder,
            layout: layout.clone(),
            schedule,
            passes: self.pipeline.passes.clone(),
            stages,
            micro_batch: training.micro_batch,
            seq: training.seq_length,
            element: training.dtype.bytes(),
            moments: Moments { matrices: matrices as u64, others: others as u64 },
            state_bytes: StateBytes {
                exp_avg: states.exp_avg.block_bytes() as u64,
                exp_avg_sq: states.exp_avg_sq.block_bytes() as u64,
                main_grads: if states.main_grads == StateDtype::F32 { 4 } else { 2 },
                main_params: states.main_params.bytes() as u64,
                ema: if training.ema_decay.is_some() { 4 } else { 0 },
            },
            offload: self.optimizer.offload(),
            newton_schulz,
            recompute: self.recompute.clone(),
            gpu: false,
            gpu_model: GPUS[0],
            overlap: performance.tp_comm_overlap,
            documents: None,
            expert_chunks: if performance.moe_comm_overlap { performance.moe_comm_chunks } else { Some(1) },
            dynamic: self.context.max_tokens_per_rank.filter(|_| self.context.dynamic),
            logits_at_once: LOGITS_AT_ONCE,
            adapters: self.adapters()?,
            post_training: self.post_training()?,
        })
    }
}

impl RunConfig {
    /// What the FLOPs of a token in sequences of `seq` tokens are counted from.
    pub fn flop_shape(&self, seq: usize) -> FlopShape {
        FlopShape { frozen: self.lora.rank.is_some(), ..Decoder::from(&self.model.config).flop_shape(seq) }
    }

    /// What a run has of post-training but adapters; of a teacher's folder its sizes are read.
    fn post_training(&self) -> Result<PostTraining, ConfigErrors> {
        let grpo = self.grpo.config();
        let loss = match (&self.distill.teacher, &self.distill.logits) {
            (Some(folder), _) => {
                let problem = |error| ConfigErrors(vec![Problem::new(format!("distill.teacher: {error}"))]);
                LossOf::Teacher(Box::new(Decoder::from(&hf_config(folder).map_err(problem)?)))
            }
            (None, Some(_)) => LossOf::TopK,
            (None, None) if grpo.is_some_and(|grpo| grpo.temperature != 1.0) => LossOf::TemperedLogits,
            (None, None) => LossOf::Label,
        };
        let completions = grpo.map(|grpo| Completions {
            longest: grpo.max_completion_length,
            reference: grpo.beta > 0.0 && (self.lora.rank.is_none() || self.lora.dora),
        });
        Ok(PostTraining { frozen: self.param_groups.frozen.clone(), loss, completions })
    }

    /// The adapters of a run as the planner sees them.
    fn adapters(&self) -> Result<Option<Adapters>, ConfigErrors> {
        let problem = |what: String| ConfigErrors(vec![Problem::new(what)]);
        let model = &self.model.config;
        let plan = self.lora.plan(model).map_err(|error| problem(format!("lora: {error}")))?;
        let Some(plan) = plan else { return Ok(None) };
        let decoder = Decoder::from(model);
        let (rank, layers) = (plan.config().rank, decoder.layers);
        let refused = |what: &str| {
            Err(problem(format!(
                "lora.rank = {rank}: memory and time of adapters {what} cannot be predicted; nearest legal: --lora.rank none, which \
                 needs more of both"
            )))
        };
        if decoder.latent.is_some() || decoder.lone_mlps.is_some() || decoder.mtp > 0 {
            return refused("in a model with latent attention, Mamba-2 or multi-token prediction");
        }
        let experts =
            (0..layers).filter_map(|layer| decoder.experts_of(layer)).map(|experts| experts.count).collect::<Vec<_>>();
        if !experts.is_empty() && experts.len() < layers {
            return refused("in a model of which only some layers have experts");
        }
        // The experts of a layer have adapters all or none.
        let mlp_of = if experts.is_empty() { "mlp" } else { "mlp.shared_experts" };
        let mlp = ["gate", "up", "down"];
        let parts = ["q", "k", "v", "o"].map(|part| (1, format!("attention.{part}_proj"))).into_iter();
        let parts = parts.chain(mlp.map(|part| (1, format!("{mlp_of}.{part}_proj"))));
        let count = experts.first().copied().unwrap_or(0);
        let parts: Vec<(usize, String)> =
            parts.chain(mlp.map(|part| (count, format!("mlp.experts.0.{part}_proj")))).collect();
        let has: Vec<bool> = parts.iter().map(|(_, part)| plan.has(&format!("layers.0.{part}"))).collect();
        let counted: usize = parts.iter().zip(&has).filter(|(_, has)| **has).map(|((count, _), _)| count).sum();
        let same = |layer: usize| {
            parts.iter().zip(&has).all(|((_, part), has)| plan.has(&format!("layers.{layer}.{part}")) == *has)
        };
        if !(1..layers).all(same) || counted * layers != plan.len() {
            return refused("of some layers only");
        }
        Ok(Some(Adapters {
            rank: rank as u64,
            dora: plan.config().dora,
            qkv: [has[0], has[1], has[2]],
            out: has[3],
            up: [has[4], has[5]],
            down: has[6],
            expert_up: [has[7], has[8]],
            expert_down: has[9],
            base: self.lora.base,
        }))
    }
}

impl From<&LlamaConfig> for Decoder {
    fn from(config: &LlamaConfig) -> Self {
        let (block, attention) = (config.block(0), config.attention(0));
        Self {
            vocab: config.vocab_size,
            vocab_multiple: config.make_vocab_size_divisible_by,
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            experts: None,
            layers: config.num_hidden_layers,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            latent: None,
            linear: None,
            mamba: None,
            lone_mlps: None,
            mtp: 0,
            window: config.sliding_window,
            windowed_layers: (0..config.num_hidden_layers).filter(|layer| config.window(*layer).is_some()).count(),
            gated: true,
            query_key_norm: attention.query_key_norm.map(|norm| norm.over),
            norms: block.placement,
            norm_bias: false,
            softcap: attention.softcap.is_some(),
            sinks: false,
            output_gate: false,
            attention_bias: [attention.input.bias, attention.output.bias],
            mlp_bias: config.mlp_bias,
            positions: None,
            rope: true,
            tied: config.tie_word_embeddings,
        }
    }
}

impl From<&Mamba2Config> for Decoder {
    fn from(config: &Mamba2Config) -> Self {
        Self {
            vocab: config.vocab_size,
            vocab_multiple: config.make_vocab_size_divisible_by,
            hidden: config.hidden_size,
            intermediate: 0,
            experts: None,
            layers: config.num_hidden_layers,
            heads: config.num_heads,
            kv_heads: config.num_heads,
            head_dim: config.head_dim,
            latent: None,
            linear: None,
            mamba: Some(StateSpace {
                layers: (0..config.num_hidden_layers).collect(),
                heads: config.num_heads,
                head_dim: config.head_dim,
                groups: config.n_groups,
                state: config.state_size,
                kernel: config.conv_kernel,
                conv_bias: config.use_conv_bias,
                bias: config.use_bias,
            }),
            lone_mlps: Some(Vec::new()),
            mtp: 0,
            window: None,
            windowed_layers: 0,
            gated: false,
            query_key_norm: None,
            norms: NormPlacement::Before,
            norm_bias: false,
            softcap: false,
            sinks: false,
            output_gate: false,
            attention_bias: [false; 2],
            mlp_bias: false,
            positions: None,
            rope: false,
            tied: config.tie_word_embeddings,
        }
    }
}

impl From<&NemotronHConfig> for Decoder {
    fn from(config: &NemotronHConfig) -> Self {
        let mamba = config.layers_of(HybridLayer::Mamba2);
        Self {
            vocab: config.vocab_size,
            vocab_multiple: config.make_vocab_size_divisible_by,
            hidden: config.hidden_size,
            intermediate: config.intermediate_size,
            experts: None,
            layers: config.num_hidden_layers(),
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            latent: None,
            linear: None,
            mamba: (!mamba.is_empty()).then_some(StateSpace {
                layers: mamba,
                heads: config.mamba_num_heads,
                head_dim: config.mamba_head_dim,
                groups: config.n_groups,
                state: config.ssm_state_size,
                kernel: config.conv_kernel,
                conv_bias: config.use_conv_bias,
                bias: config.use_bias,
            }),
            lone_mlps: Some(config.layers_of(HybridLayer::Mlp)),
            mtp: 0,
            window: None,
            windowed_layers: 0,
            gated: false,
            query_key_norm: None,
            norms: NormPlacement::Before,
            norm_bias: false,
            softcap: false,
            sinks: false,
            output_gate: false,
            attention_bias: [false; 2],
            mlp_bias: config.mlp_bias,
            positions: None,
            rope: false,
            tied: config.tie_word_embeddings,
        }
    }
}

/// The layers with linear attention, if there are such.
fn linear_layers(config: &MixtralConfig) -> Option<Linear> {
    let (layers, sizes) = (config.linear_layers(), config.linear_attention());
    (!layers.is_empty()).then_some(Linear {
        layers,
        key_heads: sizes.key_heads,
        value_heads: sizes.value_heads,
        key_dim: sizes.key_dim,
        value_dim: sizes.value_dim,
        kernel: sizes.kernel,
    })
}

impl From<&FamilyConfig> for Decoder {
    fn from(config: &FamilyConfig) -> Self {
        match config {
            FamilyConfig::Llama(config) => Self::from(config),
            FamilyConfig::Mixtral(config) => Self {
                vocab: config.vocab_size,
                vocab_multiple: config.make_vocab_size_divisible_by,
                hidden: config.hidden_size,
                intermediate: config.intermediate_size,
                experts: Some(Experts {
                    count: config.num_experts,
                    top_k: config.num_experts_per_tok,
                    intermediate: config.expert_size(),
                    shared: config.shared_expert().unwrap_or(0),
                    shared_gate: config.has_shared_gate(),
                    biases: config.variant == models::MixtralVariant::GptOss,
                    dense_layers: config.dense_layers(),
                }),
                layers: config.num_hidden_layers,
                heads: config.num_attention_heads,
                kv_heads: config.num_key_value_heads,
                head_dim: config.head_dim,
                latent: None,
                linear: linear_layers(config),
                mamba: None,
                lone_mlps: None,
                mtp: 0,
                window: config.sliding_window,
                windowed_layers: (0..config.num_hidden_layers).filter(|layer| config.window(*layer).is_some()).count(),
                gated: true,
                query_key_norm: config.has_head_norms().then_some(NormOver::Head),
                norms: NormPlacement::Before,
                norm_bias: false,
                softcap: false,
                sinks: config.variant == models::MixtralVariant::GptOss,
                output_gate: config.variant == models::MixtralVariant::Qwen3Next,
                attention_bias: [config.has_input_biases(), config.has_output_bias()],
                mlp_bias: false,
                positions: None,
                rope: true,
                tied: config.tie_word_embeddings,
            },
            FamilyConfig::DeepSeekV3(config) => Self {
                vocab: config.vocab_size,
                vocab_multiple: config.make_vocab_size_divisible_by,
                hidden: config.hidden_size,
                intermediate: config.intermediate_size,
                experts: Some(Experts {
                    count: config.n_routed_experts,
                    top_k: config.num_experts_per_tok,
                    intermediate: config.moe_intermediate_size,
                    shared: config.shared_intermediate_size(),
                    shared_gate: false,
                    biases: false,
                    dense_layers: (0..config.first_k_dense_replace).collect(),
                }),
                layers: config.num_hidden_layers,
                heads: config.num_attention_heads,
                kv_heads: config.num_attention_heads,
                head_dim: config.qk_nope_head_dim + config.qk_rope_head_dim,
                latent: Some(Latent {
                    queries: config.q_lora_rank,
                    keys: config.kv_lora_rank,
                    rotated: config.qk_rope_head_dim,
                    unrotated: config.qk_nope_head_dim,
                    value: config.v_head_dim,
                }),
                linear: None,
                mamba: None,
                lone_mlps: None,
                mtp: config.num_nextn_predict_layers,
                window: None,
                windowed_layers: 0,
                gated: true,
                query_key_norm: None,
                norms: NormPlacement::Before,
                norm_bias: false,
                softcap: false,
                sinks: false,
                output_gate: false,
                attention_bias: [false; 2],
                mlp_bias: false,
                positions: None,
                rope: true,
                tied: false,
            },
            FamilyConfig::Mamba2(config) => Self::from(config),
            FamilyConfig::NemotronH(config) => Self::from(config),
            FamilyConfig::Gpt(config) => Self {
                vocab: config.vocab_size,
                vocab_multiple: config.make_vocab_size_divisible_by,
                hidden: config.hidden_size,
                intermediate: config.intermediate_size,
                experts: None,
                layers: config.num_hidden_layers,
                heads: config.num_attention_heads,
                kv_heads: config.num_attention_heads,
                head_dim: config.head_dim(),
                latent: None,
                linear: None,
                mamba: None,
                lone_mlps: None,
                mtp: 0,
                window: None,
                windowed_layers: 0,
                gated: false,
                query_key_norm: None,
                norms: NormPlacement::Before,
                norm_bias: true,
                softcap: false,
                sinks: false,
                output_gate: false,
                attention_bias: [config.bias; 2],
                mlp_bias: config.bias,
                positions: Some(config.max_position_embeddings),
                rope: false,
                tied: config.tie_word_embeddings,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use backend_dist::launch::launch;
    use backend_dist::mesh::{Mesh, ParallelLayout};
    use burn::tensor::{Device, FloatDType};
    use models::{
        CausalLm, DeepSeekV3Config, GptConfig, LlamaConfig, LlamaVariant, Mamba2Config, MixtralConfig, MixtralVariant,
        ModelConfig, NemotronHConfig, ParamBuilder, WithModel,
    };

    use super::*;
    use crate::plan::{Plan, gpus};

    /// Parameters of the first tensor parallel rank of a model that is really built.
    struct Built(ParallelLayout);

    impl WithModel for Built {
        type Output = u64;

        fn with<M: CausalLm + 'static>(self, config: &M::Config) -> u64 {
            let mesh = Mesh::new(self.0).unwrap();
            let count = |rank: backend_dist::launch::Rank| {
                let model = M::build(config, ParamBuilder::new(&rank, FloatDType::F32, 1))?;
                Ok(model.registry().iter().filter(|spec| spec.trained).map(|spec| spec.local_len() as u64).sum::<u64>())
            };
            launch(&mesh, &[Device::flex()], count).unwrap()[0]
        }
    }

    #[test]
    fn planned_parameters_are_those_of_models_that_are_built() {
        let llama = LlamaConfig { make_vocab_size_divisible_by: 7, ..LlamaConfig::tiny() };
        let gpt = GptConfig { vocab_size: 250, make_vocab_size_divisible_by: 16, ..GptConfig::tiny() };
        let models = [
            FamilyConfig::Llama(llama.clone()),
            FamilyConfig::Llama(LlamaConfig { tie_word_embeddings: true, attention_bias: true, ..llama.clone() }),
            FamilyConfig::Llama(LlamaConfig { variant: LlamaVariant::Qwen3, mlp_bias: true, ..llama.clone() }),
            FamilyConfig::Llama(LlamaConfig { variant: LlamaVariant::Qwen2, ..llama.clone() }),
            FamilyConfig::Llama(LlamaConfig { variant: LlamaVariant::Olmo2, ..llama.clone() }),
            FamilyConfig::Llama(LlamaConfig {
                variant: LlamaVariant::Gemma3,
                tie_word_embeddings: true,
                ..llama.clone()
            }),
            FamilyConfig::Llama(LlamaConfig { variant: LlamaVariant::Glm4, attention_bias: true, ..llama }),
            FamilyConfig::Gpt(gpt.clone()),
            FamilyConfig::Gpt(GptConfig { tie_word_embeddings: false, bias: false, ..gpt }),
            FamilyConfig::Mixtral(MixtralConfig::tiny()),
            FamilyConfig::Mixtral(MixtralConfig {
                variant: MixtralVariant::Qwen3Moe,
                mlp_only_layers: vec![1],
                moe_intermediate_size: Some(32),
                ..MixtralConfig::tiny()
            }),
            FamilyConfig::Mixtral(MixtralConfig {
                variant: MixtralVariant::GptOss,
                attention_bias: true,
                ..MixtralConfig::tiny()
            }),
            FamilyConfig::Mixtral(MixtralConfig { variant: MixtralVariant::Qwen2Moe, ..MixtralConfig::tiny() }),
            FamilyConfig::Mixtral(MixtralConfig {
                variant: MixtralVariant::Glm4Moe,
                first_k_dense_replace: 1,
                attention_bias: true,
                use_qk_norm: true,
                ..MixtralConfig::tiny()
            }),
            FamilyConfig::Mamba2(Mamba2Config { use_bias: true, tie_word_embeddings: true, ..Mamba2Config::tiny() }),
            FamilyConfig::Mamba2(Mamba2Config { n_groups: 1, use_conv_bias: false, ..Mamba2Config::tiny() }),
            FamilyConfig::NemotronH(NemotronHConfig { mlp_bias: true, ..NemotronHConfig::tiny() }),
            FamilyConfig::NemotronH(NemotronHConfig {
                hybrid_override_pattern: "*-*".into(),
                tie_word_embeddings: true,
                ..NemotronHConfig::tiny()
            }),
            FamilyConfig::Mixtral(MixtralConfig {
                linear_num_key_heads: Some(8),
                linear_num_value_heads: Some(16),
                ..MixtralConfig::qwen3_next_tiny()
            }),
            FamilyConfig::DeepSeekV3(DeepSeekV3Config::tiny()),
            FamilyConfig::DeepSeekV3(DeepSeekV3Config {
                q_lora_rank: None,
                num_nextn_predict_layers: 2,
                ..DeepSeekV3Config::tiny()
            }),
        ];
        let hardware = gpus::Hardware::of(gpus::find("h100").unwrap(), 4);
        for model in models {
            for tp in [1, 2, 8] {
                let layout = ParallelLayout { tp, sp: true, ..ParallelLayout::default() };
                let mut config = RunConfig::parse("run.toml", "", &[]).unwrap();
                config.model.config = model.clone();
                config.parallel = layout.clone();
                assert_eq!(model.check(), Ok(()));
                let plan = Plan::new(config.job().unwrap(), &hardware).unwrap();
                assert_eq!(plan.memory[0].states.weights, 4 * model.visit(Built(layout)), "{model:?} TP{tp}");
            }
        }
    }
}
