//! A language model that sees, a plain Burn module: it learns to say what is drawn, letter by letter, and tells it of
//! drawings that it never saw. One line, marked below, trains it in any layout of tensor and data parallelism with ZeRO.
//!
//! ```text
//! cargo run --release --example llava -- --layout "TP2 SP"
//! ```

use std::process::ExitCode;

use burn::data::dataloader::batcher::Batcher;
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::train::metric::LossMetric;
use burn::train::{ClassificationOutput, ExecutionStrategy, Learner, SupervisedTraining};
use burn_megatron::prelude::*;
use clap::Parser;
use examples::drawings::{Picture, SHAPES, SIZE, drawings};
use examples::{Args, classification_steps, loader, report, tell, trained};
use models::images::{ClipVisionConfig, Llava, LlavaConfig};

/// Letters are their bytes.
const IMAGE: usize = 128;
const BEGIN: usize = 1;
const END: usize = 0;
/// No label.
const IGNORED: i64 = -100;
/// Tokens of a sequence after the image: the longest text and its end.
const TEXT: usize = 8;

fn main() -> ExitCode {
    report(run(&Args::parse()))
}

fn config() -> LlavaConfig {
    LlavaConfig {
        vision_config: ClipVisionConfig {
            hidden_size: 48,
            intermediate_size: 96,
            image_size: SIZE,
            num_channels: 1,
            ..ClipVisionConfig::tiny()
        },
        text_config: LlamaConfig { vocab_size: IMAGE + 8, ..LlamaConfig::tiny() },
        image_token_index: IMAGE,
        ..LlavaConfig::tiny()
    }
}

fn run(args: &Args) -> anyhow::Result<()> {
    let (config, device) = (config(), args.device()?);
    config.check()?;
    let batches = |pictures| loader(pictures, 32, Captions { image_tokens: config.image_tokens() });
    let model = Captioner { llava: Llava::new(&config, &device.clone().autodiff()) };
    let strategy = match args.layout() {
        None => ExecutionStrategy::single(device.clone()).into(),
        Some(layout) => MegatronStrategy::mesh(layout).plan(Llava::plan()).into(), // <- the line that changes
    };
    let result = SupervisedTraining::new("runs/llava", batches(drawings(6144, 1)), batches(drawings(256, 2)))
        .metrics((LossMetric::new(),))
        .num_epochs(4)
        .with_training_strategy(strategy)
        .summary()
        .launch(Learner::new(model, AdamWConfig::new().init(), 2e-3));
    let model = trained(result)?.llava;
    let unseen = drawings(64, 3);
    let mut right = 0;
    for (index, picture) in unseen.iter().enumerate() {
        let prompt: Vec<i64> = prompt(config.image_tokens()).collect();
        let tokens = Tensor::<1, Int>::from_data(prompt.as_slice(), &device).unsqueeze();
        let pixels = Tensor::from_data(TensorData::new(picture.pixels.clone(), [1, 1, SIZE, SIZE]), &device);
        let answer: String =
            model.generate(tokens, pixels, TEXT, END).iter().map(|token| *token as u8 as char).collect();
        right += usize::from(answer == text(picture.class));
        if index < SHAPES.len() {
            tell(format_args!("a drawing of {}: the model says \"{answer}\"", text(picture.class)));
        }
    }
    tell(format_args!(
        "{right} of {} drawings it never saw are named right; chance is {}",
        unseen.len(),
        unseen.len() / SHAPES.len()
    ));
    Ok(())
}

/// What is said of a shape.
fn text(class: usize) -> String {
    format!("a {}", SHAPES[class])
}

/// A sequence begins with its image.
fn prompt(image_tokens: usize) -> impl Iterator<Item = i64> {
    std::iter::once(BEGIN as i64).chain(std::iter::repeat_n(IMAGE as i64, image_tokens))
}

#[derive(Module, Debug)]
struct Captioner {
    llava: Llava,
}

/// Tokens `[batch, length]`, their labels, and images `[batch, 1, SIZE, SIZE]`.
type Batch = (Tensor<2, Int>, Tensor<2, Int>, Tensor<4>);

impl Captioner {
    fn forward(&self, (tokens, labels, images): Batch) -> ClassificationOutput {
        let logits = self.llava.forward(tokens, images);
        let [batch, length, vocabulary] = logits.dims();
        let loss = Llava::loss(logits.clone(), labels.clone());
        let all = batch * length;
        ClassificationOutput::new(loss, logits.reshape([all, vocabulary]), labels.reshape([all]))
    }
}

classification_steps!(Captioner, Batch);

struct Captions {
    image_tokens: usize,
}

impl Batcher<Picture, Batch> for Captions {
    fn batch(&self, pictures: Vec<Picture>, device: &Device) -> Batch {
        let (count, length) = (pictures.len(), 1 + self.image_tokens + TEXT);
        let letters = |picture: &Picture| text(picture.class).bytes().map(i64::from).collect::<Vec<_>>();
        let padded = |letters: Vec<i64>, padding: i64| {
            let padding = std::iter::repeat_n(padding, TEXT - 1 - letters.len());
            letters.into_iter().chain([END as i64]).chain(padding).collect::<Vec<_>>()
        };
        let tokens =
            pictures.iter().flat_map(|picture| prompt(self.image_tokens).chain(padded(letters(picture), END as i64)));
        let none = || std::iter::repeat_n(IGNORED, 1 + self.image_tokens);
        let labels = pictures.iter().flat_map(|picture| none().chain(padded(letters(picture), IGNORED)));
        let ints = |ids: Vec<i64>| Tensor::from_data(TensorData::new(ids, [count, length]), device);
        let (tokens, labels) = (ints(tokens.collect()), ints(labels.collect()));
        let pixels: Vec<f32> = pictures.into_iter().flat_map(|picture| picture.pixels).collect();
        (tokens, labels, Tensor::from_data(TensorData::new(pixels, [count, 1, SIZE, SIZE]), device))
    }
}
