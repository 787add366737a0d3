//! Upper limits of sizes, those of models from the `models` crate. Sizes above them are refused before anything is
//! computed from them, so that no multiplication overflows and no list of layers, experts, ranks or micro-batches grows
//! without bound.

use backend_dist::mesh::ParallelLayout;
use models::{FamilyConfig, ModelConfig, size_limit};
use serde_json::Value;

use super::decoder::decoder_of;
use super::model::kebab;
use super::problem::{ConfigErrors, Problem};
use super::run::RunConfig;
use crate::plan::PASSES;

/// The numbers of a batch.
const LARGEST: u64 = 1 << 32;
/// Ranks.
pub(crate) const RANKS: u64 = 1 << 20;
/// Parameters: a thousand times as many as the largest models have.
const PARAMETERS: f64 = (1u64 << 50) as f64;
/// Elements of the widest tensor of a micro-batch, in all layers.
const ELEMENTS: f64 = (1u64 << 54) as f64;

impl RunConfig {
    /// Whether the sizes are within their limits and make a model.
    pub(super) fn is_sound(&self) -> bool {
        self.size_problems().is_empty() && self.model.config.check().is_ok()
    }

    /// Refuses what is above a limit.
    ///
    /// # Errors
    /// Every size above its limit, with the nearest legal value.
    pub fn check_limits(&self) -> Result<(), ConfigErrors> {
        ConfigErrors::from_problems(self.size_problems())
    }

    /// Sizes above their limits, with the nearest legal value.
    pub(super) fn size_problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut note = |key: &str, value: u64, most: u64| {
            if value > most {
                let what = format!("{key} = {value} is more than can be trained; nearest legal: {most}");
                problems.push(Problem::new(what));
            }
        };
        for (key, value) in model_sizes(&self.model.config) {
            note(&format!("model.{}", kebab(&key)), value, size_limit(&key));
        }
        let (training, layout) = (&self.training, &self.parallel);
        let batch = [
            ("seq-length", training.seq_length),
            ("micro-batch", training.micro_batch),
            ("global-batch", training.global_batch),
        ];
        for (key, value) in batch {
            note(&format!("training.{key}"), value as u64, LARGEST);
        }
        for (key, value) in ranks(layout) {
            note(&format!("parallel.{key}"), value as u64, RANKS);
        }
        // What follows from the sizes of a model that cannot be built is not defined.
        if problems.is_empty() && self.model.config.check().is_ok() {
            problems.extend(self.combined_problems());
        }
        problems
    }

    /// The same for combinations of sizes, each of which may be legal.
    fn combined_problems(&self) -> Vec<Problem> {
        let (training, layout) = (&self.training, &self.parallel);
        let product = |sizes: &[usize]| sizes.iter().map(|size| *size as f64).product::<f64>();
        let decoder = decoder_of(&self.model.config);
        let experts = decoder.experts.as_ref();
        // The vocabulary is padded to a multiple on every rank.
        let vocab = product(&[decoder.vocab_multiple.max(1), layout.tp]).max(decoder.vocab as f64);
        let hidden = decoder.hidden as f64;
        let heads = product(&[decoder.heads.max(decoder.kv_heads), decoder.head_dim]);
        let of_experts = experts.map_or(0.0, |of| product(&[of.count, of.intermediate]) + of.shared as f64);
        let layers = (decoder.layers + decoder.mtp) as f64;
        let parameters =
            2.0 * vocab * hidden + layers * hidden * (4.0 * heads + 3.0 * (decoder.intermediate as f64 + of_experts));
        let used = experts
            .map_or(0.0, |of| product(&[of.top_k.max(1), of.intermediate.max(decoder.hidden)]) + of.count as f64);
        let widest =
            [hidden, 3.0 * heads, 2.0 * decoder.intermediate as f64, 2.0 * used].into_iter().fold(0.0, f64::max);
        let tokens = product(&[training.micro_batch, training.seq_length]);
        let batch = product(&[training.global_batch, training.seq_length]);
        let passes = training.global_batch as f64 / training.micro_batch.max(1) as f64 / layout.dp.max(1) as f64
            * product(&[layout.pp, layout.vpp]);
        let world = product(&[layout.tp, layout.cp, layout.dp, layout.pp]);
        let sums = [
            ("the model has", parameters, "parameters", PARAMETERS),
            ("a micro-batch has", tokens * (layers * widest).max(vocab), "elements in its widest tensors", ELEMENTS),
            ("a step has", batch, "tokens", ELEMENTS),
            ("a step has", passes, "passes of pipeline stages", PASSES as f64),
            ("the layout has", world, "ranks", RANKS as f64),
        ];
        let wrong = sums.into_iter().filter(|(_, value, _, most)| value > most);
        let problem = |(has, value, what, most): (&str, f64, &str, f64)| {
            Problem::new(format!("{has} {value:.1e} {what}, more than can be trained: at most {most:.1e}"))
        };
        wrong.map(problem).collect()
    }
}

/// The whole numbers of a model's configuration by their keys.
fn model_sizes(config: &FamilyConfig) -> Vec<(String, u64)> {
    let Ok(Value::Object(fields)) = serde_json::to_value(config) else { return Vec::new() };
    fields.into_iter().filter_map(|(key, value)| Some((key, value.as_u64()?))).collect()
}

fn ranks(layout: &ParallelLayout) -> [(&'static str, usize); 7] {
    [
        ("tensor-parallel", layout.tp),
        ("context-parallel", layout.cp),
        ("expert-parallel", layout.ep),
        ("expert-tensor-parallel", layout.expert_tp()),
        ("pipeline-parallel", layout.pp),
        ("virtual-pipeline", layout.vpp),
        ("data-parallel", layout.dp),
    ]
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;
    use crate::plan::{Plan, gpus};

    const KEYS: &str = "\
        model.hidden-size model.num-hidden-layers model.vocab-size model.intermediate-size model.num-attention-heads \
        model.num-key-value-heads model.head-dim model.make-vocab-size-divisible-by model.max-position-embeddings \
        model.sliding-window model.num-experts model.num-experts-per-tok model.moe-intermediate-size \
        model.n-routed-experts model.first-k-dense-replace model.num-nextn-predict-layers model.kv-lora-rank \
        parallel.tensor-parallel parallel.context-parallel parallel.expert-parallel parallel.pipeline-parallel \
        parallel.virtual-pipeline parallel.data-parallel training.seq-length training.micro-batch \
        training.global-batch context.max-tokens-per-rank";

    /// What `plan` says: the bytes of the fullest rank, the seconds of a step, the parameters.
    fn plan(toml: &str, keys: &[(String, String)]) -> Result<(u64, f64, usize), String> {
        let config = RunConfig::parse("run.toml", toml, keys).map_err(|error| error.to_string())?;
        let job = config.job().map_err(|error| error.to_string())?.on_gpus();
        let plan =
            Plan::new(job, &gpus::Hardware::of(gpus::find("h200").unwrap(), 2)).map_err(|error| error.to_string())?;
        Ok((plan.memory[plan.fullest()].peak(), plan.time.step, config.model.config.parameter_count()))
    }

    const MODELS: [&str; 3] =
        ["[model]\npreset = \"llama3-8b\"\n", "[model]\nfamily = \"mixtral\"\n", "[model]\nfamily = \"deepseek_v3\"\n"];

    #[test]
    fn huge_sizes_are_refused_by_name() {
        for (key, value, nearest) in [
            ("model.hidden-size", "4611686018427387904", "nearest legal: 4294967296"),
            ("model.vocab-size", "1000000000000", "nearest legal: 4294967296"),
            ("model.num-hidden-layers", "1000000", "nearest legal: 4096"),
            ("parallel.data-parallel", "1000000000000", "nearest legal: 1048576"),
            ("model.hidden-size", "1000000000", " elements, more than 281474976710656; take smaller sizes"),
            ("training.global-batch", "4000000000", "passes of pipeline stages, more than can be trained"),
            (
                "model.make-vocab-size-divisible-by",
                "4000000000000",
                "model.make-vocab-size-divisible-by = 4000000000000",
            ),
        ] {
            says!(plan(MODELS[0], &[(key.into(), value.into())]).unwrap_err(), nearest);
        }
        let zero = [("model.make-vocab-size-divisible-by".to_string(), "0".to_string())];
        let refused = plan(MODELS[0], &zero).unwrap_err();
        says!(refused, "make_vocab_size_divisible_by = 0 is not positive; nearest legal: 1");
    }

    fn key() -> impl Strategy<Value = &'static str> {
        prop::sample::select(KEYS.split(' ').collect::<Vec<_>>())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]
        #[test]
        fn any_sizes_are_planned_or_refused_at_once(
            model in 0usize..MODELS.len(),
            by_cost: bool,
            keys in prop::collection::vec((key(), 0u32..63, 0u64..3), 1..4),
        ) {
            let number = |power: u32, more: u64| (1u64 << power) + more - 1;
            let by_cost = by_cost.then(|| ("pipeline.layout".to_string(), "auto".to_string()));
            let keys = keys.into_iter().map(|(key, power, more)| (key.into(), number(power, more).to_string()));
            let keys: Vec<(String, String)> = keys.chain(by_cost).collect();
            let start = Instant::now();
            if let Ok((bytes, step, parameters)) = plan(MODELS[model], &keys) {
                // Nothing wrapped around: a rank holds its share of the weights.
                let config = RunConfig::parse("run.toml", MODELS[model], &keys).unwrap();
                let layout = &config.parallel;
                let ranks = (layout.world_size() * layout.vpp) as f64;
                prop_assert!(parameters > 0 && bytes as f64 >= parameters as f64 / ranks, "{keys:?}: {bytes} {parameters}");
                prop_assert!(step.is_finite() && step > 0.0, "{keys:?}: {step}");
            }
            // One core of a busy machine, without optimisation.
            prop_assert!(start.elapsed().as_secs() < 20, "{keys:?}: {:?}", start.elapsed());
        }
    }
}
