//! The Rust of the documents compiles: every block of it is in a source file, most of them in this one.
#![allow(clippy::redundant_closure, reason = "it is written as the documents have it")]

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::TransformerEncoder;
use burn::nn::{Embedding, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::prelude::*;
use burn::tensor::FloatDType;
use burn::tensor::activation::silu;
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_megatron::data::TokensInMemory;
use burn_megatron::data::images::{ImageProcessor, RgbImage};
use burn_megatron::hf::{ModuleFolder, write_module_adapter};
use burn_megatron::prelude::*;
use burn_megatron::steps_of_stages;
use models::images::Llava;
use models::lora::with_adapters;
use models::{LoraConfig, T5};
use tests::repository;

/// The code of a text: without comment signs, what keeps its form, and white space.
fn code(text: &str) -> String {
    let line = |line: &str| line.trim().trim_start_matches("///").trim_start_matches("//!").to_owned();
    let lines = text.lines().map(line).filter(|line| line != "#[rustfmt::skip]");
    lines.collect::<String>().split_whitespace().collect()
}

#[test]
fn every_rust_block_of_the_documents_is_in_a_source() {
    let sources: Vec<String> = repository::files(".rs").iter().map(|path| code(&repository::read(path))).collect();
    let (mut count, mut lost) = (0, Vec::new());
    for path in repository::files(".md").into_iter().filter(|path| path.starts_with("docs/")) {
        let text = repository::read(&path);
        for block in text.split("```").skip(1).step_by(2).filter(|block| block.starts_with("rust")) {
            let (_, block) = block.split_once('\n').expect("a line with the language");
            count += 1;
            if !sources.iter().any(|source| source.contains(&code(block))) {
                lost.push(format!("{path}:\n{block}"));
            }
        }
    }
    assert!(count >= 9, "only {count} blocks found");
    assert!(lost.is_empty(), "no source file has these lines; tests/guide.rs compiles such:\n{}", lost.join("\n"));
}

#[derive(Module, Debug)]
struct MyModel {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl MyModel {
    fn new(device: &Device) -> Self {
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self { gate: linear(8, 16), up: linear(8, 16), down: linear(16, 8) }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.down.forward(silu(self.gate.forward(x.clone())) * self.up.forward(x))
    }

    fn loss(&self, x: Tensor<3>) -> Tensor<1> {
        (self.forward(x.clone()) - x).square().mean()
    }
}

impl TrainStep for MyModel {
    type Input = Tensor<3>;
    type Output = RegressionOutput;

    fn step(&self, x: Tensor<3>) -> TrainOutput<RegressionOutput> {
        let output = InferenceStep::step(self, x);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for MyModel {
    type Input = Tensor<3>;
    type Output = RegressionOutput;

    fn step(&self, x: Tensor<3>) -> RegressionOutput {
        let [output, targets] = [self.forward(x.clone()), x.clone()].map(|y| y.flatten(0, 1));
        RegressionOutput::new(self.loss(x), output, targets)
    }
}

fn batch(device: &Device) -> Tensor<3> {
    my_batch(0..4, device)
}

fn my_batch(items: Range<usize>, device: &Device) -> Tensor<3> {
    let (count, first) = (items.len(), items.start);
    let numbers = (0..count * 32).map(|at| ((first * 32 + at) as f64).sin());
    Tensor::<1>::from_data(numbers.collect::<Vec<_>>().as_slice(), device).reshape([count, 4, 8])
}

#[allow(dead_code, reason = "docs/guide/library.md: any Burn module")]
#[rustfmt::skip]
fn any_burn_module(
    directory: &str,
    [train, valid]: [Arc<dyn DataLoader<Tensor<3>>>; 2],
    (model, optimizer, schedule): (MyModel, ModuleOptimizer, f64),
) -> Result<(), BoxError> {
    SupervisedTraining::new(directory, train, valid)
        .with_training_strategy(MegatronStrategy::mesh("TP2 SP DP2 ZeRO1".parse()?).into())
        .launch(Learner::new(model, optimizer, schedule));
    Ok(())
}

#[allow(dead_code, reason = "docs/guide/library.md: tensor and sequence parallelism of your module")]
#[rustfmt::skip]
fn a_logical_device() -> Result<(), BoxError> {
    let devices = [Device::flex()];
    launch(&Mesh::new("TP2".parse()?)?, &devices, |rank| {
        let device = rank.logical_device(&[Axis::Tp]).autodiff();
        let model = parallelize(MyModel::new(&device), &rank, &Plan::auto().columns("gate|up").rows("down"))?;
        let mut optimizer = AdamWConfig::new().init();
        let x = batch(&device).redistribute(&rank, Axis::Tp, Placement::Shard(1)); // sequence parallelism: shard dimension 1
        let grads = GradientsParams::from_grads(model.loss(x).backward(), &model);
        println!("{}", explain(&device)); // collectives, and operations that ran whole for want of a rule
        Ok(optimizer.step(1e-3, model, grads))
    })?;
    Ok(())
}

#[cfg(feature = "cuda")]
#[allow(dead_code, reason = "docs/guide/library.md: a faster device for one GPU")]
#[rustfmt::skip]
fn a_faster_device(train: fn(MyModel) -> Result<(), BoxError>) -> Result<(), BoxError> {
    launch(&Mesh::new("DP1".parse()?)?, &[Device::cuda(0)], |rank| {
        let mixed = LogicalOptions { autocast: Some(FloatDType::BF16), ..Default::default() };
        let device = rank.logical_device_with(&[], mixed).autodiff();
        train(MyModel::new(&device)) // f32 parameters, gradients and optimizer states
    })?;
    Ok(())
}

/// What the block about pipelines calls `Classifier` and `Batch`.
#[derive(Module, Debug)]
struct Classifier {
    tokens: Embedding,
    encoder: TransformerEncoder,
    head: Linear,
}

#[derive(Module, Debug)]
struct Batch {
    tokens: Tensor<2, Int>,
    padding: Tensor<2, Bool>,
    classes: Tensor<1, Int>,
}

impl Classifier {
    fn embed(&self, tokens: &Tensor<2, Int>) -> Tensor<3> {
        self.tokens.forward(tokens.clone())
    }

    fn classify(&self, x: Tensor<3>, batch: &Batch) -> ClassificationOutput {
        let output = self.head.forward(x.mean_dim(1).squeeze_dim::<2>(1));
        let loss = CrossEntropyLossConfig::new().init(&output.device()).forward(output.clone(), batch.classes.clone());
        ClassificationOutput::new(loss, output, batch.classes.clone())
    }
}

steps_of_stages!(Classifier, Batch, ClassificationOutput);

#[allow(dead_code, non_local_definitions, reason = "docs/guide/library.md: pipelines and recomputation")]
#[rustfmt::skip]
fn pipelines() -> Result<StagesStrategy, BoxError> {
    impl Stages for Classifier {
        type Activation = Tensor<3>;

        fn blocks(&self) -> usize {
            self.encoder.layers.len()
        }

        fn owner(&self, path: &str) -> Option<Part> { // first part, list of blocks, last part
            Part::by_path(path, "tokens|positions", "encoder.layers", "head")
        }

        fn first(&self, batch: &Batch) -> Tensor<3> {
            self.embed(&batch.tokens)
        }

        fn block(&self, index: usize, x: Tensor<3>, batch: &Batch) -> Tensor<3> {
            self.encoder.layers[index].forward(x, Some(batch.padding.clone()), None)
        }

        fn last(&self, x: Tensor<3>, batch: &Batch) -> (Tensor<1>, ClassificationOutput) {
            let output = self.classify(x, batch);
            (output.loss.clone(), output)
        }
    }

    let layout = "TP2 SP PP2 DP2 ZeRO1".parse()?;
    let strategy = MegatronStrategy::mesh(layout).micro_batches(8).recompute(Recompute::full()).stages();
    Ok(strategy)
}

// tests/layouts.rs: a process of its own, whose first tensor decides that floats are f64
#[test]
#[rustfmt::skip]
fn my_model_trains_over_ranks_as_on_one_device() {
    let report = verify_module(
        |device| MyModel::new(device),
        |model: &MyModel, items, device: &Device| model.loss(my_batch(items, device)),
        &["DP2".parse().unwrap(), "DP4 ZeRO2".parse().unwrap()],
    );
    println!("{}", report.unwrap());
}

#[allow(dead_code, reason = "docs/guide/library.md: a model of our layers")]
#[rustfmt::skip]
fn a_model_of_our_layers(tokens: Vec<i64>) -> Result<(), BoxError> {
    let config = LlamaConfig::tiny();
    let data = Arc::new(TokensInMemory::new(tokens, 64));
    let mesh = Mesh::new("TP2 SP PP2 DP2".parse()?)?;
    let (recipe, dims) = (EngineConfig::new(2, 16, LrConfig::constant(1e-3)), config.dims());
    let run = Pretraining::new(mesh, recipe, 100, (data.clone(), data), dims, move |rank, part| {
        Ok(Llama::build(&config, ParamBuilder::new(rank, FloatDType::F32, 1234).with_part(part))?)
    });
    let (training, learner) = run.supervised();
    training.launch(learner);
    Ok(())
}

#[allow(dead_code, reason = "docs/planning.md")]
#[rustfmt::skip]
fn a_planned_module() -> Result<(), BoxError> {
    let run = ModuleRun { layout: "TP2 SP DP4 ZeRO1".parse()?, micro_batches: 4, ..ModuleRun::default() };
    println!("{}", plan_module(|device| MyModel::new(device), |model, device| model.loss(batch(device)), &run)?);
    Ok(())
}

#[allow(dead_code, reason = "docs/guide/hugging-face.md")]
#[rustfmt::skip]
fn a_vision_model(device: Device, processor: ImageProcessor) -> Result<(Llava, Vec<f32>), BoxError> {
    let folder = ModuleFolder::open("llava-hf/llava-1.5-7b-hf")?;
    let config = folder.config::<Llava>()?;
    let model: Llava = folder.read(&config, FloatDType::BF16, &device)?;
    let picture = processor.process(&RgbImage::decode(&std::fs::read("cat.jpg")?)?); // [3, 336, 336]
    Ok((model, picture))
}

#[allow(dead_code, reason = "docs/guide/fine-tune.md")]
#[rustfmt::skip]
fn adapters_of_a_module() -> Result<(), BoxError> {
    let folder = ModuleFolder::open("google-t5/t5-small")?;
    let t5: T5 = folder.read(&folder.config::<T5>()?, FloatDType::F32, &Device::flex().autodiff())?;
    let plan = LoraConfig { rank: 16, target_modules: vec!["q".into(), "v".into()], ..LoraConfig::default() }.module_plan(&t5)?;
    let t5 = with_adapters(t5, &plan, None)?; // everything else is frozen
    // ... train T5Training { t5 } with burn-train, in any layout of a Burn module ...
    write_module_adapter(Path::new("adapter"), &t5, &plan, Some("google-t5/t5-small"))?;
    Ok(())
}
