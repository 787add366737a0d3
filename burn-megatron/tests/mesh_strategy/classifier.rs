//! A classifier of texts as Burn's users build it.

use parking_lot::{Mutex, MutexGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::ParamGroup;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use burn::nn::{BatchNorm, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::GradientCheckpointingStrategy;
use burn::train::{ClassificationOutput, InferenceStep, Interrupter, TrainOutput, TrainStep};

use burn_megatron::prelude::{Part, Stages};

use crate::clip_grad_norm::clip_grad_norm;
use crate::cpu;
use crate::passes::Passes;
use crate::values::{All, Known};

pub const WIDTH: usize = 16;
pub const LENGTH: usize = 6;
pub const VOCABULARY: usize = 24;
pub const CLASSES: usize = 4;

#[derive(Module, Debug)]
pub struct Classifier {
    tokens: Embedding,
    encoder: TransformerEncoder,
    /// Of what goes into the head.
    pub norm: Option<BatchNorm>,
    pub head: Linear,
    #[module(skip)]
    pub trap: Trap,
}

/// Fails or stops at a step of all ranks.
#[derive(Clone, Debug, Default)]
pub struct Trap {
    pub steps: Arc<AtomicUsize>,
    pub panic_at: Option<usize>,
    pub stop_at: Option<usize>,
    /// Clips the gradients of one device.
    pub max_grad_norm: Option<f64>,
    /// Ends the process, as if it had been killed.
    pub exit_at: Option<usize>,
    pub interrupter: Handle,
    /// Steps whose activations have gradient checkpointing.
    pub checkpointed: Arc<AtomicUsize>,
    /// Sees the backward passes of ranks of one device.
    pub passes: Option<Passes>,
}

impl Trap {
    /// Before every training step: counts it, and does what was asked for in it.
    pub fn spring(&self) {
        let step = self.steps.fetch_add(1, Ordering::SeqCst) + 1;
        assert!(self.panic_at != Some(step), "the model ran into a wall");
        if self.exit_at == Some(step) {
            std::process::abort();
        }
        if self.stop_at == Some(step) {
            self.interrupter.0.stop(Some("enough"));
        }
    }
}

#[derive(Clone, Default)]
pub struct Handle(pub Interrupter);

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Handle")
    }
}

impl Classifier {
    /// With two layers.
    pub fn new(dropout: f64, trap: Trap) -> Self {
        Self::deep(2, dropout, trap)
    }

    pub fn deep(layers: usize, dropout: f64, trap: Trap) -> Self {
        let _generator = generator();
        Self::not_drawn(layers, dropout, trap).map(&mut Known::default())
    }

    /// As Burn makes a model: its parameters are drawn when they are first used.
    pub fn not_drawn(layers: usize, dropout: f64, trap: Trap) -> Self {
        let device = &cpu().autodiff();
        let encoder = TransformerEncoderConfig::new(WIDTH, 32, 4, layers).with_norm_first(true).with_dropout(dropout);
        Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(device),
            encoder: encoder.init(device),
            norm: None,
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
            trap,
        }
    }

    /// With a frozen embedding and frozen first blocks.
    pub fn frozen(mut self, blocks: usize) -> Self {
        self.tokens = self.tokens.freeze();
        let layers = self.encoder.layers.into_iter().enumerate();
        self.encoder.layers = layers.map(|(i, layer)| if i < blocks { layer.freeze() } else { layer }).collect();
        self
    }

    /// The encoder's parameters, by their ids.
    pub fn ids_of_encoder(&self) -> ParamGroup {
        ParamGroup::ids_from_module(self.encoder.clone())
    }

    /// Every number of the record.
    pub fn numbers(&self) -> Vec<f64> {
        let mut all = All::default();
        self.visit(&mut all);
        all.0
    }
}

impl TrainStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> TrainOutput<ClassificationOutput> {
        let (loss, output) = self.run(&batch);
        TrainOutput::new(self, loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, grads: GradientsParams) -> Self {
        let grads = if let Some(norm) = self.trap.max_grad_norm { clip_grad_norm(&self, grads, norm) } else { grads };
        optimizer.step(rate, self, grads)
    }
}

impl Stages for Classifier {
    type Activation = Tensor<3>;

    fn blocks(&self) -> usize {
        self.encoder.layers.len()
    }

    fn owner(&self, path: &str) -> Option<Part> {
        Part::by_path(path, "tokens", "encoder.layers", "norm|head")
    }

    fn first(&self, batch: &Batch) -> Tensor<3> {
        self.tokens.forward(batch.tokens.clone())
    }

    fn block(&self, index: usize, x: Tensor<3>, batch: &Batch) -> Tensor<3> {
        self.encoder.layers[index].forward(x, Some(batch.padding.clone()), None)
    }

    fn last(&self, x: Tensor<3>, batch: &Batch) -> (Tensor<1>, ClassificationOutput) {
        let is_training = x.device().is_autodiff();
        if is_training {
            self.trap.spring();
        }
        if x.gradient_checkpointing_strategy() == Some(GradientCheckpointingStrategy::Balanced) {
            self.trap.checkpointed.fetch_add(1, Ordering::SeqCst);
        }
        let passes = self.trap.passes.as_ref().filter(|_| is_training);
        let [count, _, _] = x.dims();
        let x = x.slice([0..count, 0..1]).reshape([count, WIDTH]);
        let x = if let Some(norm) = &self.norm { norm.forward(x) } else { x };
        let output = self.head.forward(passes.map_or(x.clone(), |passes| passes.past_head(x)));
        let classes = batch.classes.clone();
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), classes.clone());
        let loss = passes.map_or(loss.clone(), |passes| passes.begin(loss));
        (loss.clone(), ClassificationOutput::new(loss, output, classes))
    }
}

impl InferenceStep for Classifier {
    type Input = Batch;
    type Output = ClassificationOutput;

    fn step(&self, batch: Batch) -> ClassificationOutput {
        self.run(&batch).1
    }
}

#[derive(Module, Debug)]
pub struct Batch {
    pub tokens: Tensor<2, Int>,
    pub padding: Tensor<2, Bool>,
    pub classes: Tensor<1, Int>,
}

burn_megatron::sendable!(Batch: tokens, padding, classes);

/// The process has one generator, from which new models and trainings draw: one at a time.
pub fn generator() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock()
}
