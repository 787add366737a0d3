//! Every layout trains like one device in double precision, the gradients are the derivatives of the loss, and the
//! comparison notices when a layout does not agree.

use backend_dist::launch::{BoxError, Rank};
use backend_dist::mesh::ParallelLayout;
use backend_dist::shard::{HostTensor, ParamSpec, Registry};
use burn::module::Module;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use burn_megatron::engine::ContextConfig;
use burn_megatron::verify::{Candidate, Line, Settings, assemble, candidates, trace, verify};
use models::MicroBatch;
use models::layers::paged::{PagedKvCache, Step};
use models::{BuildError, CausalLm, Gpt, Llama, LlamaConfig, ModelConfig, ParamBuilder, Part};
use std::collections::BTreeMap;
use tests::{SETTINGS, gpt, llama, verified};

fn all_layouts(config: &impl ModelConfig) -> Vec<Candidate> {
    let dims = config.dims();
    let fits = |layout: &ParallelLayout, context: &ContextConfig| {
        dims.check(layout, SETTINGS.seq).is_ok() && context.check(layout, &dims).is_ok()
    };
    candidates(4, SETTINGS.global_batch, dims.layers, false, fits)
}

fn every_layout_equals_one_device<M: CausalLm>(config: &M::Config) {
    let layouts = all_layouts(config);
    assert!(layouts.len() > 100, "{}", layouts.len());
    verified::<M>(config, &SETTINGS, &layouts);
}

#[test]
fn llama_equals_one_device() {
    every_layout_equals_one_device::<Llama>(&llama());
}

#[test]
fn gpt_with_dropout_equals_one_device() {
    every_layout_equals_one_device::<Gpt>(&gpt());
}

/// Central differences of the loss in some elements of every tensor, in double precision.
fn gradients_are_derivatives<M: CausalLm>(config: &M::Config) {
    let single = Candidate::default();
    let mut job = Settings { steps: 1, global_batch: 2, ..SETTINGS }.job(config.vocab_size());
    job.engine.lr.max = 0.0;
    job.engine.lr.min = 0.0;
    job.engine.lr.init = 0.0;
    let run = |weights: Option<&BTreeMap<String, HostTensor>>| {
        let build = |rank: &Rank, _: Part| -> Result<M, BoxError> {
            let params = ParamBuilder::new(rank, FloatDType::F64, SETTINGS.seed);
            let params = match weights {
                Some(weights) => params.with_source(weights),
                None => params,
            };
            Ok(M::build(config, params)?)
        };
        trace(&single, &job, &[Device::flex()].into(), &config.dims(), build).unwrap().remove(0)
    };
    let start = run(None);
    let mut weights = assemble(&start.parameters).unwrap();
    let gradients = assemble(&start.gradients[0]).unwrap();
    for (name, gradient) in gradients {
        let largest = gradient.data.iter().fold(0.0f64, |max, g| g.abs().max(max));
        for element in [0, gradient.data.len() / 2 + 1, gradient.data.len() - 1] {
            let mut loss_at = |offset: f64| {
                let before = weights[&name].data[element];
                weights.get_mut(&name).unwrap().data[element] = before + offset;
                let loss = run(Some(&weights)).losses[0];
                weights.get_mut(&name).unwrap().data[element] = before;
                loss
            };
            let step = 1e-4;
            let slope = (loss_at(step) - loss_at(-step)) / (2.0 * step);
            let gap = (slope - gradient.data[element]).abs();
            assert!(
                gap <= 1e-4 * largest + 1e-10,
                "{name}[{element}]: gradient {}, slope {slope}, largest {largest}",
                gradient.data[element]
            );
        }
    }
}

#[test]
fn llama_gradients_are_derivatives() {
    gradients_are_derivatives::<Llama>(&llama());
}

#[test]
fn gpt_gradients_are_derivatives() {
    gradients_are_derivatives::<Gpt>(&gpt());
}

/// A Llama whose norms are registered as if sequence parallelism did not shard what they see: the sum of their
/// gradients over the tensor parallel ranks is forgotten. It panics where ranks share sequences.
#[derive(Module, Debug)]
struct ForgottenSum {
    inner: Llama,
    #[module(skip)]
    registry: Registry,
}

impl CausalLm for ForgottenSum {
    type Config = LlamaConfig;

    fn build(config: &LlamaConfig, params: ParamBuilder) -> Result<Self, BuildError> {
        let inner = Llama::build(config, params)?;
        let mut registry = Registry::default();
        for spec in inner.registry().iter() {
            registry.register(ParamSpec { partial_gradient: false, ..spec.clone() })?;
        }
        Ok(Self { inner, registry })
    }

    fn part(&self) -> &Part {
        self.inner.part()
    }

    fn embed(&self, tokens: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<3> {
        self.inner.embed(tokens, batch)
    }

    fn layer(&self, index: usize, x: Tensor<3>, batch: &MicroBatch) -> Tensor<3> {
        assert!(batch.context.is_none(), "this model cannot share sequences");
        self.inner.layer(index, x, batch)
    }

    fn head_losses(&self, x: Tensor<3>, labels: Tensor<2, Int>, batch: &MicroBatch) -> Tensor<2> {
        self.inner.head_losses(x, labels, batch)
    }

    fn head_logits(&self, x: Tensor<3>) -> Tensor<3> {
        self.inner.head_logits(x)
    }

    fn extend(&self, step: &Step, cache: &mut PagedKvCache) -> Tensor<2> {
        self.inner.extend(step, cache)
    }

    fn extend_embed(&self, step: &Step) -> Tensor<3> {
        self.inner.extend_embed(step)
    }

    fn extend_layer(&self, index: usize, x: Tensor<3>, step: &Step, cache: &mut PagedKvCache) -> Tensor<3> {
        self.inner.extend_layer(index, x, step, cache)
    }

    fn extend_head(&self, x: Tensor<3>, step: &Step) -> Tensor<2> {
        self.inner.extend_head(x, step)
    }

    fn registry(&self) -> &Registry {
        &self.registry
    }
}

#[test]
fn a_forgotten_gradient_sum_is_found() {
    let layouts = ["DP2", "TP2", "TP2 SP"].map(|text| text.parse().unwrap());
    for (dtype, steps) in [(FloatDType::F64, 3), (FloatDType::F32, 3), (FloatDType::BF16, 1)] {
        let settings = Settings { dtype, steps, ..SETTINGS };
        let lines = verify::<ForgottenSum>(&llama(), &settings, &[Device::flex()].into(), &layouts, |_| {}).unwrap();
        assert_eq!(lines.iter().map(Line::passes).collect::<Vec<_>>(), [true, true, false], "{dtype:?}");
        let worst = &lines[2].outcome.as_ref().unwrap().gradients;
        assert!(worst.relative > worst.allowed && worst.at.contains("norm"), "{dtype:?}: {worst:?}");
    }
}

/// A layout that fails is a line of the table, and the others are tried all the same.
#[test]
fn a_layout_that_fails_is_named() {
    let layouts = ["DP2", "CP2", "TP3", "DP2 ZeRO3"].map(|text| text.parse().unwrap());
    let settings = Settings { steps: 1, ..SETTINGS };
    let mut seen = 0;
    let lines = verify::<ForgottenSum>(&llama(), &settings, &[Device::flex()].into(), &layouts, |_| seen += 1).unwrap();
    assert_eq!((seen, lines.iter().map(Line::passes).collect::<Vec<_>>()), (4, vec![true, false, false, true]));
    assert_eq!(lines.iter().map(Line::failed).collect::<Vec<_>>(), [false, true, true, false]);
    let [panic, refusal] = [1, 2].map(|index| lines[index].to_string());
    assert!(panic.starts_with("CP2 ") && panic.contains("FAILED: rank"), "{panic}");
    assert!(panic.contains("this model cannot share sequences"), "{panic}");
    assert!(refusal.contains("tensor-parallel 3 does not divide"), "{refusal}");
}
