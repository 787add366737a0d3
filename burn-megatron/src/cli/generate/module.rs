//! `generate` with a plain Burn module: T5 answers a text, LLaVA continues a text with images.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use backend_dist::mesh::ParallelLayout;
use backend_dist::process::Cluster;
use backend_dist::shard::HostTensor;
use models::hf::ImageInput;
use parking_lot::Mutex;

use super::writer::Writer;
use super::{Args, Prompt, encode, read_prompt, speed, stop_tokens, tokenizer};
use crate::cli::refused;
use crate::console::warn;
use crate::data::images::{ImageProcessor, RgbImage};
use crate::data::readable_tokenizer;
use crate::forward::Settings;
use crate::generate::{ModulePrompt, generate_module, module_images};
use crate::hf::{GenerationConfig, ModuleFolder};
use crate::refusal::Access;

/// Stands for an image in a prompt of text, as in transformers.
const IMAGE: &str = "<image>";

pub(super) fn run(args: &Args, dir: &Path, cluster: &Cluster) -> Result<ExitCode> {
    let folder = ModuleFolder::open(dir)?;
    if let Some(window) = args.window {
        bail!("--window {window} is for causal language models; nearest legal: none");
    }
    let images = module_images(&folder).map_err(|error| anyhow!("{}: {error}", dir.display()))?;
    let pixels = pixels(&args.images, images, dir)?;
    let tokenizer = readable_tokenizer(dir)?.map(|path| tokenizer(&path)).transpose()?;
    let generation = GenerationConfig::of_folder(dir)?;
    generation.note().filter(|_| cluster.is_first()).into_iter().for_each(warn);
    let (tokens, writer) = match read_prompt(args)? {
        Prompt::Tokens(tokens) => (tokens, Writer::ids()),
        Prompt::Text(text) => {
            let lacking = "the model comes without a tokenizer.json: give token ids, --tokens 1,2,3";
            let tokenizer = tokenizer.as_ref().context(lacking)?;
            let read = match images {
                Some(images) => with_image_tokens(&text, images, args.images.len(), |id| tokenizer.id_to_token(id))?,
                None => text.clone(),
            };
            let tokens = encode(&read, tokenizer)?;
            // What a decoder answers does not continue what the encoder reads.
            let writer = match images {
                Some(_) => Writer::text(tokenizer, text, &tokens),
                None => Writer::text(tokenizer, String::new(), &[]),
            };
            (tokens, writer)
        }
    };
    let stop_tokens = stop_tokens(args, &generation, None, tokenizer.as_ref())?;
    let options = args.sampling.options(&generation, args.max_new_tokens.unwrap_or(128), stop_tokens);
    let layout = ParallelLayout { tp: args.tensor_parallel, ..ParallelLayout::default() };
    layout.check()?;
    let folder = if let Some(adapter) = &args.adapter { folder.with_adapter(adapter) } else { folder };
    let settings = Settings::new(args.device.of_cluster(&layout, cluster)?, layout, args.dtype);
    let (writer, prompt) = (Mutex::new(writer), ModulePrompt { tokens, images: pixels });
    let on_token = |token| writer.lock().push(token);
    let generated =
        generate_module(&folder, &prompt, &options, &settings, &on_token).map_err(|error| anyhow!("{error}"))?;
    if cluster.is_first() {
        writer.into_inner().finish()?;
        warn(format_args!("{}", speed(prompt.tokens.len(), &generated)));
    }
    Ok(ExitCode::SUCCESS)
}

/// The images as the folder's processor makes them, `[images, channels, height, width]`.
fn pixels(paths: &[PathBuf], images: Option<ImageInput>, dir: &Path) -> Result<Option<HostTensor>> {
    let Some(first) = paths.first() else { return Ok(None) };
    let Some(ImageInput { image: [channels, size], .. }) = images else {
        bail!("--image {}: the model reads no images; nearest legal: none", first.display());
    };
    let file = ImageProcessor::file_of(dir).map_err(anyhow::Error::msg)?;
    let (_, processor) = ImageProcessor::read(&file).map_err(|error| anyhow!("{}: {error}", file.display()))?;
    let (made, taken) = (processor.output(), [size; 2]);
    ensure!(
        made == Some(taken) && channels == 3,
        "{}: images of {made:?} pixels and 3 channels, the model takes {taken:?} and {channels}",
        file.display()
    );
    let mut data = Vec::new();
    for path in paths {
        let bytes = std::fs::read(path).map_err(refused(Access::Read, path))?;
        let image = RgbImage::decode(&bytes).map_err(|what| anyhow!("--image {}: {what}", path.display()))?;
        data.extend(processor.process(&image).into_iter().map(f64::from));
    }
    Ok(Some(HostTensor { shape: vec![paths.len(), channels, size, size], data }))
}

/// The text with as many image tokens in place of each `<image>` as an image has.
fn with_image_tokens(
    text: &str,
    images: ImageInput,
    count: usize,
    token: impl Fn(u32) -> Option<String>,
) -> Result<String> {
    let found = text.matches(IMAGE).count();
    ensure!(
        found == count,
        "the prompt has {found} {IMAGE}, and there are {count} images (--image); both must be equal"
    );
    let name = token(images.token as u32)
        .with_context(|| format!("the tokenizer has no token {}, which stands for images", images.token))?;
    Ok(text.replace(IMAGE, &name.repeat(images.tokens)))
}
