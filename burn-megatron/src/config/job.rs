//! A run as the planner sees it.

use backend_dist::ops::LOGITS_AT_ONCE;
use backend_dist::ops::fp8::Fp8Scaling;

use super::decoder::decoder_of;
use super::model::hf_config;
use super::problem::{ConfigErrors, Problem};
use super::run::{Precision, RunConfig};
use crate::flops::FlopShape;
use crate::optim::{OptimizerConfig, StateDtype};
use crate::plan::gpus::GPUS;
use crate::plan::{Completions, Job, LossOf, Moments, PostTraining, StateBytes};

impl RunConfig {
    /// The run as [`plan`](crate::plan) sees it, on CPU ranks, independent of data and files.
    ///
    /// # Errors
    /// An illegal layout or batch, with the nearest legal one.
    pub fn job(&self) -> Result<Job, ConfigErrors> {
        let (training, layout, performance) = (&self.training, &self.parallel, &self.performance);
        ConfigErrors::from_problems(self.layout_problems())?;
        let problem = |what: String| ConfigErrors(vec![Problem::new(what)]);
        let decoder = decoder_of(&self.model.config);
        let batches = self.engine().plan(layout.dp).map_err(|error| problem(format!("training: {error}")))?;
        let (schedule, stages) = (self.pipeline.resolve(layout, decoder.layers, batches.accumulation))
            .map_err(|error| problem(format!("pipeline: {error}")))?;
        let (matrices, others) = self.optimizer.moments();
        let states = self.optimizer.states();
        let newton_schulz = if let OptimizerConfig::Muon(muon) = self.optimizer { Some(muon.ns_steps) } else { None };
        Ok(Job {
            fp8: self.fp8.layers(decoder.layers),
            fp8_weights: self.fp8.keep_weights,
            // Experts with biases stay in the type of training.
            fp8_experts: self.fp8.experts && decoder.experts.as_ref().is_none_or(|experts| !experts.biases),
            fp8_blocks: self.fp8.recipe == Fp8Scaling::Blockwise,
            decoder,
            layout: layout.clone(),
            schedule,
            passes: self.pipeline.passes.clone(),
            stages,
            micro_batch: training.micro_batch,
            ramp: training.rampup_batch_size,
            seq: training.seq_length,
            element: training.dtype.bytes(),
            bf16: training.dtype == Precision::Bf16,
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
            logits_at_once: performance.logits_at_once.unwrap_or(LOGITS_AT_ONCE),
            adapters: self.adapters()?,
            post_training: self.post_training()?,
        })
    }

    /// What the FLOPs of a token in sequences of `seq` tokens are counted from.
    pub fn flop_shape(&self, seq: usize) -> FlopShape {
        FlopShape { frozen: self.lora.rank.is_some(), ..decoder_of(&self.model.config).flop_shape(seq) }
    }

    /// What a run has of post-training but adapters; of a teacher's folder its sizes are read.
    fn post_training(&self) -> Result<PostTraining, ConfigErrors> {
        let grpo = self.grpo.config();
        let loss = match (&self.distill.teacher, &self.distill.logits) {
            (Some(folder), _) => {
                let problem = |error| ConfigErrors(vec![Problem::new(format!("distill.teacher: {error}"))]);
                LossOf::Teacher(Box::new(decoder_of(&hf_config(folder).map_err(problem)?)))
            }
            (None, Some(_)) => LossOf::TopK,
            (None, None) if grpo.is_some_and(|grpo| grpo.temperature != 1.0) => LossOf::TemperedLogits,
            (None, None) => LossOf::Label,
        };
        let completions = grpo.map(|grpo| Completions {
            longest: grpo.max_completion_length,
            reference: grpo.beta > 0.0 && (self.lora.rank.is_none() || self.lora.dora),
            scored: grpo.beta > 0.0,
            iterations: grpo.num_iterations,
        });
        Ok(PostTraining { frozen: self.param_groups.frozen.clone(), loss, completions })
    }
}

#[cfg(test)]
mod tests {
    use backend_dist::launch::launch;
    use backend_dist::mesh::{Mesh, ParallelLayout};
    use burn::tensor::{Device, FloatDType};
    use models::{
        CausalLm, DeepSeekV3Config, DeepSeekVariant, FamilyConfig, GptConfig, LlamaConfig, LlamaVariant, Mamba2Config,
        MixtralConfig, MixtralVariant, ModelConfig, NemotronHConfig, ParamBuilder, WithModel,
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
            FamilyConfig::Llama(LlamaConfig { variant: LlamaVariant::Glm4, attention_bias: true, ..llama.clone() }),
            FamilyConfig::Llama(LlamaConfig { variant: LlamaVariant::SeedOss, attention_bias: true, ..llama.clone() }),
            FamilyConfig::Llama(LlamaConfig { variant: LlamaVariant::Gemma, tie_word_embeddings: true, ..llama }),
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
            FamilyConfig::Mixtral(MixtralConfig { variant: MixtralVariant::Olmoe, ..MixtralConfig::tiny() }),
            FamilyConfig::Mixtral(MixtralConfig {
                variant: MixtralVariant::DeepSeek,
                first_k_dense_replace: 1,
                ..MixtralConfig::tiny()
            }),
            FamilyConfig::DeepSeekV3(DeepSeekV3Config {
                variant: DeepSeekVariant::DeepseekV2,
                norm_topk_prob: false,
                num_nextn_predict_layers: 0,
                ..DeepSeekV3Config::tiny()
            }),
            FamilyConfig::Mixtral(MixtralConfig {
                variant: MixtralVariant::Glm4Moe,
                first_k_dense_replace: 1,
                attention_bias: true,
                use_qk_norm: true,
                num_nextn_predict_layers: 1,
                ..MixtralConfig::tiny()
            }),
            FamilyConfig::Mamba2(Mamba2Config { use_bias: true, tie_word_embeddings: true, ..Mamba2Config::tiny() }),
            FamilyConfig::Mamba2(Mamba2Config { n_groups: 1, use_conv_bias: false, ..Mamba2Config::tiny() }),
            FamilyConfig::NemotronH(NemotronHConfig { mlp_bias: true, ..NemotronHConfig::tiny() }),
            FamilyConfig::NemotronH(NemotronHConfig {
                hybrid_override_pattern: "EM-*E".into(),
                ..NemotronHConfig::tiny()
            }),
            FamilyConfig::NemotronH(NemotronHConfig {
                hybrid_override_pattern: "*-*".into(),
                tie_word_embeddings: true,
                ..NemotronHConfig::tiny()
            }),
            FamilyConfig::Mixtral(MixtralConfig {
                linear_num_key_heads: Some(8),
                linear_num_value_heads: Some(16),
                num_nextn_predict_layers: 1,
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
