//! Plans of the models that are plain Burn modules.

use std::path::Path;

use backend_dist::launch::BoxError;
use backend_dist::mesh::{Nearest, ParallelLayout};
use backend_dist::parallelize::check;
use burn::module::{Module, ModuleDisplay};
use burn::tensor::{Device, Int, Tensor};
use models::hf::HfModule;
use models::images::{Llava, Siglip, Vit};
use models::lora::{LoraConfig, with_adapters};
use models::{Bert, T5};
use serde_json::Value;

use super::{ModulePlan, ModuleRun, plan_module};
use crate::hf::read_config;
use crate::learner::{BertBatch, BertTraining, Stages, T5Batch, T5Training, for_any_module};

/// What a micro-batch of a family is.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Sequences or images.
    pub batch: usize,
    /// Tokens of a sequence, with image tokens; of T5's input.
    pub length: usize,
    /// Tokens of T5's output.
    pub target: usize,
    /// Classes of a ViT, in place of those that `config.json` says.
    pub classes: Option<usize>,
    /// Adapters, next to which all other parameters are frozen.
    pub lora: Option<LoraConfig>,
}

type Plans = fn(&Value, &Subject, &ModuleRun) -> Result<ModulePlan, BoxError>;

/// Families by the `model_type` of their `config.json`.
const FAMILIES: [(&str, Plans); 5] = [("bert", bert), ("llava", llava), ("siglip", siglip), ("t5", t5), ("vit", vit)];

/// Plans the training of the plain Burn module that the `config.json` of a folder describes; weights are not needed. The
/// run's plan is the family's own.
///
/// # Errors
/// If `config.json` is none of such a model, or a length is not possible; as [`plan_module`].
pub fn plan_folder(folder: impl AsRef<Path>, subject: &Subject, run: &ModuleRun) -> Result<ModulePlan, BoxError> {
    plan_config(&read_config(folder.as_ref())?, subject, run)
}

/// The same of the text of a `config.json`.
///
/// # Errors
/// As [`plan_folder`].
pub fn plan_config(config: &Value, subject: &Subject, run: &ModuleRun) -> Result<ModulePlan, BoxError> {
    let found = config["model_type"].as_str().unwrap_or_default();
    let known = FAMILIES.iter().find(|(kind, _)| *kind == found);
    let (_, plans) = known.ok_or_else(|| {
        let legal = FAMILIES.map(|(kind, _)| kind).join(", ");
        format!(
            "config.json: `model_type` {found} is no plain Burn module; legal: {legal}; a causal language model is planned by \
             `plan RUN.toml --model.hf DIR`"
        )
    })?;
    subject.check(run.micro_batches)?;
    plans(config, subject, run)
}

impl Subject {
    /// Refuses sizes whose tensors have more bytes than can be counted.
    fn check(&self, micro_batches: usize) -> Result<(), String> {
        let (longest, classes) = (self.length.max(self.target), self.classes.unwrap_or(1));
        let named = if longest == self.length { "seq-length" } else { "target-length" };
        // Attention has as many scores as a sequence has pairs of tokens.
        let most_sequences = |longest: usize| (MOST_TOKENS * MOST_TOKENS) / (longest * longest).max(1);
        for (key, value, most) in [
            (named, longest, MOST_TOKENS),
            ("micro-batch", self.batch, most_sequences(longest.min(MOST_TOKENS))),
            ("micro-batches", micro_batches, MOST_TOKENS),
            ("num-labels", classes, MOST_TOKENS),
        ] {
            if value > most {
                return Err(format!("{key} {value} is more than can be planned; nearest legal: {most}"));
            }
        }
        Ok(())
    }
}

/// Tokens of the longest sequence that is planned.
const MOST_TOKENS: usize = 1 << 20;

fn bert(config: &Value, subject: &Subject, run: &ModuleRun) -> Result<ModulePlan, BoxError> {
    let config = sizes::<Bert>(config)?;
    if !config.predictions {
        return Err(
            "config.json: a BertModel has no head to train; nearest legal: BertForMaskedLM in `architectures`".into()
        );
    }
    let (length, most) = (subject.length, config.max_position_embeddings);
    if length > most {
        return Err(format!("seq-length {length}: the model has fewer positions; nearest legal: {most}").into());
    }
    let shape = [subject.batch, subject.length];
    of::<Bert, BertTraining>(
        &config,
        subject,
        run,
        |bert| BertTraining { bert },
        |model, device| {
            let ints = || Tensor::<2, Int>::zeros(shape, device);
            let padding = ints().equal_elem(1);
            let next_sentence = Tensor::<1, Int>::zeros([shape[0]], device);
            let batch = BertBatch { tokens: ints(), types: ints(), padding, labels: ints(), next_sentence };
            model.run(&batch).0
        },
    )
}

fn t5(config: &Value, subject: &Subject, run: &ModuleRun) -> Result<ModulePlan, BoxError> {
    let [input, output] = [subject.length, subject.target].map(|length| [subject.batch, length]);
    of::<T5, T5Training>(
        &sizes::<T5>(config)?,
        subject,
        run,
        |t5| T5Training { t5 },
        |model, device| {
            let ints = |shape| Tensor::<2, Int>::zeros(shape, device);
            let padding = ints(input).equal_elem(1);
            model.run(&T5Batch { input: ints(input), padding, output: ints(output), labels: ints(output) }).0
        },
    )
}

fn vit(config: &Value, subject: &Subject, run: &ModuleRun) -> Result<ModulePlan, BoxError> {
    let mut config = sizes::<Vit>(config)?;
    config.num_labels = subject.classes.or(config.num_labels);
    config.pooler_output_size = None; // a classifier has none
    if config.num_labels.is_none() {
        return Err(
            "config.json: a ViTModel has no head to train; say how many classes a new one has: --num-labels".into()
        );
    }
    let pixels = [subject.batch, config.num_channels, config.image_size, config.image_size];
    of::<Vit, Vit>(
        &config,
        subject,
        run,
        |vit| vit,
        |model, device| {
            let logits = model.forward(Tensor::zeros(pixels, device));
            Vit::loss(logits, Tensor::zeros([pixels[0]], device))
        },
    )
}

fn siglip(config: &Value, subject: &Subject, run: &ModuleRun) -> Result<ModulePlan, BoxError> {
    let config = sizes::<Siglip>(config)?;
    let vision = &config.vision_config;
    let pixels = [subject.batch, vision.num_channels, vision.image_size, vision.image_size];
    of::<Siglip, Siglip>(
        &config,
        subject,
        run,
        |siglip| siglip,
        |model, device| {
            let states = model.states(Tensor::zeros(pixels, device));
            let logits = model.classify(states).expect("`siglip` is the model that classifies");
            Siglip::loss(logits, Tensor::zeros([pixels[0]], device))
        },
    )
}

fn llava(config: &Value, subject: &Subject, run: &ModuleRun) -> Result<ModulePlan, BoxError> {
    let config = sizes::<Llava>(config)?;
    let (shape, vision) = ([subject.batch, subject.length], &config.vision_config);
    if subject.length <= config.image_tokens() {
        let least = config.image_tokens() + 1;
        return Err(format!("seq-length {}: an image alone is longer; nearest legal: {least}", subject.length).into());
    }
    let pixels = [subject.batch, vision.num_channels, vision.image_size, vision.image_size];
    of::<Llava, Llava>(
        &config,
        subject,
        run,
        |llava| llava,
        |model, device| {
            let ids = || Tensor::<2, Int>::zeros(shape, device);
            Llava::loss(model.forward(ids(), Tensor::zeros(pixels, device)), ids())
        },
    )
}

/// The plan of a family: `training` makes of the model what `loss` takes.
fn of<M: HfModule, T: Module + ModuleDisplay>(
    config: &M::Config,
    subject: &Subject,
    run: &ModuleRun,
    training: impl Fn(M) -> T + Sync,
    loss: impl Fn(&T, &Device) -> Tensor<1> + Sync,
) -> Result<ModulePlan, BoxError>
where
    M::Config: Sync,
{
    check_ranks::<M>(config, &run.layout)?;
    let adapters = subject.lora.as_ref().map(|lora| lora.module_plan(&M::init(config, &Device::flex()))).transpose()?;
    let make_model = |device: &Device| {
        let model = M::init(config, device);
        training(match &adapters {
            Some(plan) => with_adapters(model, plan, None).expect("the plan is of this model"),
            None => model,
        })
    };
    plan_module(make_model, loss, &ModuleRun { plan: M::plan(), ..run.clone() })
}

/// Refuses tensor-parallel ranks that cannot share the model, of which no parameter is made.
fn check_ranks<M: HfModule>(config: &M::Config, layout: &ParallelLayout) -> Result<(), BoxError> {
    for_any_module(layout)?;
    let (model, plan, sequence) = (M::init(config, &Device::flex()), M::plan(), layout.sequence_parallel());
    let fits = |tp: usize| check(&model, &plan, tp, sequence && tp > 1);
    fits(layout.tp).map_err(|error| {
        // Every try reads the whole model.
        let nearest = Nearest::where_legal(layout.tp, layout.tp.saturating_mul(2).min(256), |tp| fits(tp).is_ok());
        format!("tensor-parallel {}: {error}; nearest legal: {nearest}", layout.tp).into()
    })
}

fn sizes<M: HfModule>(config: &Value) -> Result<M::Config, BoxError> {
    Ok(M::from_hf(config)?)
}
