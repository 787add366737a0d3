//! A vision transformer for one device, a plain Burn module, learns to classify images: drawn shapes, or those of a list.
//! One line, marked below, trains it in any layout of tensor and data parallelism with ZeRO.
//!
//! ```text
//! cargo run --release --example vision_transformer -- --layout "TP2 DP2 ZeRO2"
//! cargo run --release --example vision_transformer -- --images pictures/train.jsonl --image-size 64
//! ```

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::ensure;
use burn::data::dataloader::batcher::Batcher;
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{ClassificationOutput, ExecutionStrategy, Learner, SupervisedTraining};
use burn_megatron::data::images::{ImageDataset, ImageProcessor, Target};
use burn_megatron::prelude::*;
use clap::Parser;
use examples::drawings::{Picture, SHAPES, SIZE, drawings};
use examples::{Args, accuracy, classification_steps, loader, report, tell, trained};
use models::images::{Vit, VitConfig};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: Args,
    /// Images with `label`: a .jsonl file, or a .tar file of WebDataset; without it drawn shapes
    #[arg(long, value_name = "LIST")]
    images: Option<PathBuf>,
    /// Pixels of a side to which the images are scaled
    #[arg(long, default_value_t = 32, requires = "images")]
    image_size: usize,
    /// Leaves out images that cannot be used, and says how many
    #[arg(long, requires = "images")]
    skip_unusable: bool,
}

fn main() -> ExitCode {
    report(run(&Cli::parse()))
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    let device = cli.args.device()?;
    let (config, train, valid) = match &cli.images {
        None => (sizes(1, SIZE, SHAPES.len()), drawings(6144, 1), drawings(512, 2)),
        Some(list) => read(list, cli.image_size, cli.skip_unusable)?,
    };
    config.check()?;
    let images = || Images { shape: [config.num_channels, config.image_size] };
    let (train, valid) = (loader(train, 32, images()), loader(valid, 32, images()));
    let model = Classifier { vit: Vit::new(&config, &device.clone().autodiff()) };
    let strategy = match cli.args.layout() {
        None => ExecutionStrategy::single(device.clone()).into(),
        Some(layout) => MegatronStrategy::mesh(layout).plan(Vit::plan()).into(), // <- the line that changes
    };
    let result = SupervisedTraining::new("runs/vision_transformer", train, valid.clone())
        .metrics((LossMetric::new(), AccuracyMetric::new()))
        .num_epochs(4)
        .with_training_strategy(strategy)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 2e-3));
    let model = trained(result)?;
    let right = accuracy(&valid, &device, |batch| model.forward(batch))?;
    let chance = 100.0 / config.num_labels.unwrap_or(1) as f64;
    tell(format_args!("{:.1} % of images it never saw are told right; chance is {chance:.0} %", 100.0 * right));
    Ok(())
}

/// A small ViT.
fn sizes(num_channels: usize, image_size: usize, num_labels: usize) -> VitConfig {
    VitConfig {
        hidden_size: 48,
        intermediate_size: 96,
        num_channels,
        image_size,
        num_labels: Some(num_labels),
        initializer_range: 0.1,
        ..VitConfig::tiny()
    }
}

/// The images of a list, every tenth of them for validation.
fn read(list: &Path, size: usize, skip: bool) -> anyhow::Result<(VitConfig, Vec<Picture>, Vec<Picture>)> {
    sizes(3, size, 1).check()?;
    let images = ImageDataset::open(list, skip)?;
    if !images.skipped().is_empty() {
        tell(format_args!("{} samples are left out; the first: {}", images.skipped().len(), images.skipped()[0]));
    }
    let keys =
        serde_json::json!({"image_processor_type": "ViTImageProcessor", "size": {"height": size, "width": size}});
    let processor = ImageProcessor::from_json(&keys)?;
    let (mut train, mut valid, mut classes) = (Vec::new(), Vec::new(), 0);
    for index in 0..images.len() {
        let Target::Label(class) = *images.target(index) else {
            anyhow::bail!("{}: a sample has no `label`; this example learns classes", list.display());
        };
        // Numbers that are no classes, such as identifiers, would make a head that does not fit into memory.
        ensure!(
            class < images.len(),
            "{}: `label` is {class}; legal: below {}, the images",
            list.display(),
            images.len()
        );
        classes = classes.max(class + 1);
        let picture = Picture { pixels: processor.process(&images.image(index)?), class };
        if index % 10 == 9 { &mut valid } else { &mut train }.push(picture);
    }
    ensure!(!valid.is_empty(), "{}: has {} images; legal: at least 10", list.display(), images.len());
    Ok((sizes(3, size, classes), train, valid))
}

#[derive(Module, Debug)]
struct Classifier {
    vit: Vit,
}

impl Classifier {
    fn forward(&self, (images, classes): Batch) -> ClassificationOutput {
        let output = self.vit.forward(images);
        ClassificationOutput::new(Vit::loss(output.clone(), classes.clone()), output, classes)
    }
}

classification_steps!(Classifier, Batch);

/// Images `[batch, channels, height, width]` and the class of each.
type Batch = (Tensor<4>, Tensor<1, Int>);

/// Batches of images with these channels and this height and width.
struct Images {
    shape: [usize; 2],
}

impl Batcher<Picture, Batch> for Images {
    fn batch(&self, pictures: Vec<Picture>, device: &Device) -> Batch {
        let classes: Vec<i64> = pictures.iter().map(|picture| picture.class as i64).collect();
        let pixels: Vec<f32> = pictures.into_iter().flat_map(|picture| picture.pixels).collect();
        let [channels, size] = self.shape;
        let images = Tensor::from_data(TensorData::new(pixels, [classes.len(), channels, size, size]), device);
        (images, Tensor::from_data(classes.as_slice(), device))
    }
}
