//! Text from a plain Burn module of a Hugging Face folder, over tensor-parallel ranks.

use std::ops::ControlFlow;
use std::time::Instant;

use backend_dist::launch::BoxError;
use backend_dist::mesh::{Axis, Mesh};
use backend_dist::mesh_backend::Teams;
use backend_dist::parallelize::parallelize_on;
use backend_dist::shard::HostTensor;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use models::T5;
use models::hf::{ImageInput, WritingModule};
use models::images::Llava;

use super::choice::Choice;
use super::choose::choose;
use super::options::GenerateOptions;
use super::run::Generated;
use super::texts::Ended;
use super::{GenerateError, TextRules};
use crate::forward::{Settings, read_module};
use crate::hf::ModuleFolder;
use crate::logits::Seen;

/// What a module continues, or answers.
#[derive(Clone, Debug, PartialEq)]
pub struct ModulePrompt {
    /// Of one sequence, with as many image tokens as the images have features.
    pub tokens: Vec<i64>,
    /// `[images, channels, height, width]`, if there are any.
    pub images: Option<HostTensor>,
}

type OnToken<'a> = &'a (dyn Fn(i64) -> ControlFlow<()> + Sync);
type Write = fn(&ModuleFolder, &ModulePrompt, &GenerateOptions, &Settings, OnToken) -> Result<Generated, BoxError>;
type Images = fn(&ModuleFolder) -> Result<Option<ImageInput>, BoxError>;

/// Families by the `model_type` of their `config.json`.
const FAMILIES: [(&str, Images, Write); 2] =
    [("llava", images_of::<Llava>, write::<Llava>), ("t5", images_of::<T5>, write::<T5>)];

fn family(folder: &ModuleFolder) -> Result<(Images, Write), BoxError> {
    let found = FAMILIES.iter().find(|(kind, ..)| *kind == folder.model_type());
    found.map(|(_, images, write)| (*images, *write)).ok_or_else(|| {
        let legal = FAMILIES.map(|(kind, ..)| kind).join(", ");
        format!("`model_type` {} writes no text; legal: {legal}, and causal language models", folder.model_type())
            .into()
    })
}

/// The images that the model of a folder reads, if it does.
///
/// # Errors
/// If the model writes no text, or its `config.json` is none of such a model.
pub fn module_images(folder: &ModuleFolder) -> Result<Option<ImageInput>, BoxError> {
    family(folder)?.0(folder)
}

/// Writes what follows a prompt: T5's decoder answers what its encoder reads, LLaVA continues text and images. The layout
/// may have tensor parallelism; the first rank chooses, and `on_token` is called with each token as it comes. Of the
/// options a window has no meaning.
///
/// # Errors
/// If the model writes no text; if prompt, options, layout and model do not fit, or a rank fails.
pub fn generate_module(
    folder: &ModuleFolder,
    prompt: &ModulePrompt,
    options: &GenerateOptions,
    settings: &Settings,
    on_token: OnToken,
) -> Result<Generated, BoxError> {
    family(folder)?.1(folder, prompt, options, settings, on_token)
}

fn images_of<M: WritingModule>(folder: &ModuleFolder) -> Result<Option<ImageInput>, BoxError> {
    Ok(M::images(&folder.config::<M>()?))
}

fn write<M: WritingModule + Sync + 'static>(
    folder: &ModuleFolder,
    prompt: &ModulePrompt,
    options: &GenerateOptions,
    settings: &Settings,
    on_token: OnToken,
) -> Result<Generated, BoxError> {
    let config = folder.config::<M>()?;
    options.check_choices()?;
    check(prompt, M::vocabulary(&config), M::images(&config))?;
    let (module, _) = read_module::<M>(folder, settings)?;
    let mesh = Mesh::new(settings.layout.clone())?;
    let teams = Teams::new(&mesh, Axis::Tp).sequence_parallel(settings.layout.sequence_parallel());
    let all = settings.cluster.launch_all(&mesh, |rank| {
        teams.run(&rank, |device| -> Result<Told, BoxError> {
            let module = parallelize_on(module.clone(), &device, &rank, &M::plan())?;
            let images = prompt.images.as_ref().map(|images| {
                let shape: [usize; 4] = images.shape.clone().try_into().expect("checked above");
                Tensor::from_data(TensorData::new(images.data.clone(), shape), (&device, DType::from(settings.dtype)))
            });
            Ok(write_by(&module, &device, &prompt.tokens, images, options, on_token)?)
        })
    })?;
    let told = all.into_iter().flatten().next();
    let (tokens, ended, [prompt_seconds, decode_seconds]) = told.expect("the first rank of a team gives its value");
    Ok(Generated { tokens, ended, prompt_seconds, decode_seconds })
}

/// The fields of [`Generated`], as processes send them.
type Told = (Vec<i64>, Ended, [f64; 2]);

/// Whether the model can read the prompt.
fn check(prompt: &ModulePrompt, vocab_size: usize, images: Option<ImageInput>) -> Result<(), BoxError> {
    if prompt.tokens.is_empty() {
        return Err(GenerateError::EmptyPrompt.into());
    }
    if let Some(&token) = prompt.tokens.iter().find(|token| !(0..vocab_size as i64).contains(token)) {
        return Err(GenerateError::UnknownToken { token, vocab_size }.into());
    }
    let shape = prompt.images.as_ref().map(|images| images.shape.as_slice());
    let Some(ImageInput { token, tokens, image: [channels, size] }) = images else {
        return shape.map_or(Ok(()), |_| Err("the model reads no images; nearest legal: none".into()));
    };
    let count = match shape {
        None => 0,
        Some(&[count, c, height, width]) if [c, height, width] == [channels, size, size] => count,
        Some(shape) => {
            return Err(format!("images have shape {shape:?}; legal: [images, {channels}, {size}, {size}]").into());
        }
    };
    let (found, needed) = (prompt.tokens.iter().filter(|id| **id == token as i64).count(), count * tokens);
    if found != needed {
        return Err(format!(
            "the prompt has {found} image tokens ({token}); legal: {needed}, {tokens} for each of {count} images"
        )
        .into());
    }
    Ok(())
}

/// What `module` on `device` writes after a prompt that was checked.
pub(crate) fn write_by<M: WritingModule>(
    module: &M,
    device: &Device,
    prompt: &[i64],
    images: Option<Tensor<4>>,
    options: &GenerateOptions,
    on_token: OnToken,
) -> Result<Told, GenerateError> {
    let ids = |ids: &[i64]| Tensor::<2, Int>::from_data(TensorData::new(ids.to_vec(), [1, ids.len()]), device);
    let (mut clock, mut prompt_seconds) = (Instant::now(), 0.0);
    let mut seen = module.before(prompt);
    let before = || Seen::new(&seen, prompt, &options.stop_tokens, options.max_new_tokens);
    let mut rules = TextRules::new(&options.processors, &options.sampling, before);
    let (first, mut ended, mut cache) = (seen.len(), Ended::Length, None);
    for index in 0..options.max_new_tokens {
        let logits = match (&mut cache, seen.last()) {
            (Some(cache), Some(last)) => module.extend(ids(&[*last]), cache),
            _ => {
                let (read, logits) = module.read(ids(prompt), images.clone());
                cache = Some(read);
                logits
            }
        };
        let chosen = choose(logits, &[Choice::next(options.sampling, &rules, index, None)]).remove(0);
        let (token, _) = chosen.map_err(|why| why.after(prompt.len() + index))?;
        if index == 0 {
            (prompt_seconds, clock) = (clock.elapsed().as_secs_f64(), Instant::now());
        }
        seen.push(token);
        TextRules::push(&mut rules, token);
        let reader = on_token(token);
        if options.stop_tokens.contains(&token) {
            ended = Ended::StopToken;
            break;
        }
        if reader.is_break() {
            ended = Ended::Reader;
            break;
        }
    }
    Ok((seen.split_off(first), ended, [prompt_seconds, clock.elapsed().as_secs_f64()]))
}
