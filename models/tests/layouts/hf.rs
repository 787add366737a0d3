//! Tiny Hugging Face checkpoints give transformers' loss, logits and gradients; see `tests/golden/README.md` of the
//! workspace.

use std::collections::BTreeMap;

use backend_dist::shard::HostTensor;
use burn::tensor::FloatDType;
use models::hf::{has_images, name_in_language_model};
use models::layers::moe::RoutingReplay;
use models::{CausalLm, ConfigError, FamilyConfig, ModelConfig, WithModel};
use safetensors::{Dtype, SafeTensors};

use crate::harness::{Batch, assert_close, assert_within, run_on};

const POSITIONS: usize = 8;

const LOGITS: f64 = 1e-12;
/// transformers computes the router of DeepSeek-V3 and GLM-4.5 in fp32, its GEMM included, in an order of MKL's own. With the
/// router in fp64 (`router_fp64.safetensors`) there is nothing between us but [`LOGITS`].
const LOGITS_OF_DEEPSEEK: f64 = 2e-7;
/// Gemma 2's eager attention, the only one of transformers' with a soft cap, has its softmax in fp32.
const LOGITS_OF_GEMMA2: f64 = 1e-6;
/// transformers computes the delta rule and the gate of its output in fp32, and norms. The loss follows from these logits.
/// Without these casts (`unrounded.safetensors`) there is nothing between us but [`LOGITS`], and [`GRADIENTS`] in fp32.
const LOGITS_OF_QWEN3_NEXT: f64 = 2e-6;
/// transformers computes the recurrence of Mamba-2 in fp32, in Mamba-2 alone the residual stream too, in Nemotron-H logits.
const LOGITS_OF_MAMBA2: f64 = 1e-6;
/// [`LOGITS_OF_MAMBA2`] next to [`LOGITS_OF_DEEPSEEK`]: Nemotron 3 has both. Without these casts to fp32
/// (`unrounded.safetensors`), those of its norms among them, there is nothing between us but [`LOGITS`].
const LOGITS_OF_NEMOTRON_3: f64 = 1e-6;
/// transformers rotates the queries and keys of ERNIE 4.5 and DeepSeek-V2 in fp32, and a residual stream of another size than ours is
/// rounded otherwise in Granite's norms. Without these casts (`unrounded.safetensors`) there is nothing between us but [`LOGITS`].
const LOGITS_OF_RELATIVES: f64 = 2e-6;
/// In bf16, with the experts of fp64.
const HALF: f64 = 0.03;
/// The small outputs of its recurrences are normalised, with their rounding.
const HALF_OF_QWEN3_NEXT: f64 = 0.05;
/// The oracle keeps gradients in fp32, and its backward pass goes through fp32 norms.
const GRADIENTS: f64 = 1e-6;
/// Through norms or rotations in fp32 gradients are fp32's too.
const GRADIENTS_OF_RELATIVES: f64 = 5e-6;
/// Through transformers' delta rule in fp32 gradients are fp32's too.
const GRADIENTS_OF_QWEN3_NEXT: f64 = 1e-5;
/// Those of a head's decay are small sums of large fp32 terms.
const GRADIENTS_OF_DECAY: f64 = 1e-4;
/// The oracle's loss is fp32.
const LOSS: f64 = 1e-7;

pub fn tensors(bytes: &[u8]) -> BTreeMap<String, HostTensor> {
    let file = SafeTensors::deserialize(bytes).unwrap();
    let read = |view: safetensors::tensor::TensorView| {
        let data = view.data();
        let data = match view.dtype() {
            Dtype::F32 => data.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect(),
            Dtype::F64 => data.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            Dtype::I64 => data.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f64).collect(),
            other => panic!("{other:?}"),
        };
        HostTensor { shape: view.shape().to_vec(), data }
    };
    file.iter().map(|(name, view)| (name.to_string(), read(view))).collect()
}

struct Transformers<'a> {
    weights: BTreeMap<String, HostTensor>,
    oracle: &'a [u8],
    /// How far logits may be from the oracle's.
    logits: f64,
    /// How far the loss may be.
    loss: f64,
    /// How far gradients may be.
    gradients: f64,
    /// How far logits may be in bf16.
    half: f64,
    /// Norms are in fp32 as in transformers' fp64.
    fp32_norms: bool,
    /// What transformers computes without rounding in the router, or anywhere, where that is a file of its own.
    unrounded: Option<&'a [u8]>,
}

impl WithModel for Transformers<'_> {
    type Output = ();

    fn with<M: CausalLm + 'static>(self, config: &M::Config) {
        let (oracle, unrounded) = (tensors(self.oracle), self.unrounded.map(tensors));
        let weights = config.hf_names().import(&self.weights).unwrap();
        let ids: Vec<i64> = oracle["input_ids"].data.iter().map(|id| *id as i64).collect();
        let [samples, seq] = oracle["input_ids"].shape[..] else { panic!("input_ids is no matrix") };
        let vocab = config.vocab_size();
        // The last position predicts nothing: its weight is zero.
        let next = |index: usize| if index % seq == seq - 1 { 0 } else { ids[index + 1] };
        let weight = |index: usize| if index % seq == seq - 1 { 0.0 } else { 1.0 / (samples * (seq - 1)) as f64 };
        let batch = Batch {
            samples,
            tokens: ids.clone(),
            labels: (0..samples * seq).map(next).collect(),
            weights: (0..samples * seq).map(weight).collect(),
            routing: Some(RoutingReplay::recording()),
        };
        let experts = ["TP2 EP2 ETP1", "TP4 SP EP2 ETP2", "TP4 SP EP4 ETP1"];
        let experts = experts.iter().filter(|_| config.dims().experts.is_some());
        // Qwen3-Next's checkpoint has two key heads in its layers of linear attention.
        let legal = |layout: &&&str| config.dims().check(&layout.parse().unwrap(), seq).is_ok();
        for layout in ["TP1", "TP2", "TP2 SP", "TP4", "TP4 SP"].iter().chain(experts).filter(legal) {
            let dtype = FloatDType::F64;
            let outcome = run_on::<M>(config, layout, dtype, &weights, &batch, None, |params| match self.fp32_norms {
                true => params.with_fp32_norms(),
                false => params,
            });
            let loss: f64 = outcome.losses.iter().zip(&batch.weights).map(|(loss, weight)| loss * weight).sum();
            assert_close(&format!("{layout}: loss"), &[loss], &oracle["loss"].data, self.loss);
            let (logits, expected) = (last(&outcome.logits, [seq, vocab]), &oracle["logits_last8"].data);
            assert_close(&format!("{layout}: logits"), &logits, expected, self.logits);
            if let Some(unrounded) = &unrounded {
                assert_close(&format!("{layout}: logits"), &logits, &unrounded["logits_last8"].data, LOGITS);
                if let Some(exact) = unrounded.get("loss") {
                    assert_close(&format!("{layout}: loss"), &[loss], &exact.data, LOGITS);
                }
            }
            let mut gradients = outcome.gradients;
            // What no gradient changes is in files too.
            for (name, foreign) in config.hf_names().iter().filter(|(name, _)| name.ends_with(".expert_bias")) {
                let shape = foreign.our_shape();
                gradients.insert(name.to_string(), HostTensor { data: vec![0.0; shape.iter().product()], shape });
            }
            let gradients = config.hf_names().export(&gradients).unwrap();
            let exact = unrounded.iter().flatten().filter_map(|(name, of)| Some((name.strip_prefix("grad.")?, of)));
            for (name, expected) in exact {
                let what = format!("{layout}: gradient of {name} without rounding");
                assert_within(&what, &gradients[name].data, &expected.data, GRADIENTS, 1e-6);
            }
            let mut compared = 0;
            for (name, expected) in &oracle {
                let Some(name) = name.strip_prefix("grad.") else { continue };
                let what = format!("{layout}: gradient of {name}");
                let is_decay = ["A_log", "dt_bias"].iter().any(|part| name.ends_with(part));
                let limit = if is_decay { GRADIENTS_OF_DECAY } else { self.gradients };
                // Far below the floor the oracle's fp32 has nothing to say: key biases have no gradient at all.
                assert_within(&what, &gradients[name].data, &expected.data, limit, 1e-6);
                compared += 1;
            }
            assert!(compared > 10);
        }
        // Rounding alone: where a token chooses other experts for it, more is different.
        let half = Batch { routing: batch.routing.as_ref().map(RoutingReplay::following), ..batch };
        let config = &in_16_bits::<M>(config);
        let outcome = run_on::<M>(config, "TP2 SP", FloatDType::BF16, &weights, &half, None, |params| params);
        assert_close("bf16: logits", &last(&outcome.logits, [seq, vocab]), &oracle["logits_last8"].data, self.half);
    }
}

/// A model of these sizes that computes in bf16: a Mamba-2 with residuals in fp32 is refused there.
fn in_16_bits<M: CausalLm>(config: &M::Config) -> M::Config {
    match config.check_dtype(FloatDType::BF16) {
        Err(ConfigError::Residuals { .. }) => {
            let mut keys = serde_json::to_value(config).unwrap();
            keys["residual_in_fp32"] = false.into();
            serde_json::from_value(keys).unwrap()
        }
        other => other.map(|()| config.clone()).unwrap(),
    }
}

/// Those of the last positions of each sample.
fn last(logits: &[f64], [seq, vocab]: [usize; 2]) -> Vec<f64> {
    logits.chunks_exact(seq * vocab).flat_map(|sample| &sample[(seq - POSITIONS) * vocab..]).copied().collect()
}

/// Models with [`LOGITS_OF_RELATIVES`].
const RELATIVES: [&str; 4] = ["ernie4_5", "granite", "deepseek_v2", "deepseek_v2_lite"];

macro_rules! is_transformers {
    ($($test:ident: $folder:literal),+ $(,)?) => {$(
        #[test]
        fn $test() {
            let file = |name: &str| std::fs::read(format!(
                "{}/../tests/golden/hf/{}/{name}", env!("CARGO_MANIFEST_DIR"), $folder
            )).unwrap();
            let config: serde_json::Value = serde_json::from_slice(&file("config.json")).unwrap();
            let (weights, oracle) = (file("model.safetensors"), file("oracle.safetensors"));
            let called = |(name, tensor): (String, HostTensor)| match has_images(&config) {
                true => Some((name_in_language_model(&name)?.into_owned(), tensor)),
                false => Some((name, tensor)),
            };
            let weights: BTreeMap<_, _> = tensors(&weights).into_iter().filter_map(called).collect();
            let config = FamilyConfig::from_hf(&config).unwrap().hf_present(|name| weights.contains_key(name));
            // transformers has the router's GEMM in fp32, in Nemotron 3 what Mamba-2 has too.
            let unrounded = match $folder {
                "deepseek_v3" | "glm4_moe" => Some(file("router_fp64.safetensors")),
                "nemotron3" | "qwen3_next" => Some(file("unrounded.safetensors")),
                of if RELATIVES.contains(&of) => Some(file("unrounded.safetensors")),
                _ => None,
            };
            let logits = match $folder {
                "deepseek_v3" | "glm4_moe" => LOGITS_OF_DEEPSEEK,
                "gemma2" => LOGITS_OF_GEMMA2,
                "qwen3_next" => LOGITS_OF_QWEN3_NEXT,
                "mamba2" | "nemotron_h" => LOGITS_OF_MAMBA2,
                "nemotron3" => LOGITS_OF_NEMOTRON_3,
                of if RELATIVES.contains(&of) => LOGITS_OF_RELATIVES,
                _ => LOGITS,
            };
            let (loss, gradients, half) = match $folder {
                "qwen3_next" => (LOGITS_OF_QWEN3_NEXT, GRADIENTS_OF_QWEN3_NEXT, HALF_OF_QWEN3_NEXT),
                of if RELATIVES.contains(&of) => (LOGITS_OF_RELATIVES, GRADIENTS_OF_RELATIVES, HALF),
                _ => (LOSS, GRADIENTS, HALF),
            };
            let unrounded = unrounded.as_deref();
            // Nemotron 3's norms multiply with their weight in fp32, which ours do not; without rounding ours are fp64.
            let fp32_norms = !["nemotron3", "qwen3_next"].contains(&$folder) && !RELATIVES.contains(&$folder);
            let oracle = &oracle;
            config.visit(Transformers { weights, oracle, logits, loss, gradients, half, fp32_norms, unrounded });
        }
    )+};
}

is_transformers! {
    llama2_is_transformers: "llama2",
    llama3_is_transformers: "llama3",
    mistral_is_transformers: "mistral",
    qwen2_is_transformers: "qwen2",
    qwen3_is_transformers: "qwen3",
    qwen3_window_is_transformers: "qwen3_window",
    smollm3_is_transformers: "smollm3",
    olmo2_is_transformers: "olmo2",
    olmo3_is_transformers: "olmo3",
    olmoe_is_transformers: "olmoe",
    granite_is_transformers: "granite",
    seed_oss_is_transformers: "seed_oss",
    ernie_4_5_is_transformers: "ernie4_5",
    deepseek_moe_is_transformers: "deepseek",
    deepseek_v2_is_transformers: "deepseek_v2",
    deepseek_v2_lite_is_transformers: "deepseek_v2_lite",
    gemma_is_transformers: "gemma",
    gemma2_is_transformers: "gemma2",
    gemma3_is_transformers: "gemma3",
    gemma3_images_is_transformers: "gemma3_images",
    phi3_is_transformers: "phi3",
    phi3_longrope_is_transformers: "phi3_longrope",
    glm4_is_transformers: "glm4",
    gpt_oss_is_transformers: "gpt_oss",
    mixtral_is_transformers: "mixtral",
    mixtral_window_is_transformers: "mixtral_window",
    qwen2_moe_is_transformers: "qwen2_moe",
    glm4_moe_is_transformers: "glm4_moe",
    qwen3_moe_is_transformers: "qwen3_moe",
    qwen3_next_is_transformers: "qwen3_next",
    deepseek_v3_is_transformers: "deepseek_v3",
    gpt2_is_transformers: "gpt2",
    mamba2_is_transformers: "mamba2",
    nemotron_h_is_transformers: "nemotron_h",
    nemotron_3_is_transformers: "nemotron3",
}
