//! LLaVA learns captions of images and what an assistant says of them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use models::images::{Llava, LlavaConfig, VisionFamily};
use serde_json::json;

use super::family::{Family, ModuleData, save_tokenizer};
use super::images::{Pixels, images};
use crate::config::ModuleConfig;
use crate::data::images::{ImageText, ImageTokenizer};
use crate::hf::copy_small_files;
use crate::learner::LlavaBatch;
use crate::train::TrainError;

impl Family for Llava {
    fn data(config: &ModuleConfig, sizes: &LlavaConfig) -> Result<ModuleData<LlavaBatch>, TrainError> {
        let (pixels, length) = (pixels(config, sizes)?, config.training.seq_length);
        let most = sizes.text_config.max_position_embeddings;
        let least = sizes.image_tokens() + 1;
        if length > most || length < least {
            let (why, nearest) = match length > most {
                true => (format!("the model has {most} positions"), most),
                false => (format!("an image alone has {} tokens", sizes.image_tokens()), least),
            };
            return Err(TrainError::Module(format!("training.seq-length = {length}: {why}; nearest legal: {nearest}")));
        }
        let tokenizer = Arc::new(tokenizer(config, sizes)?);
        let (image, dtype, of_batch) = (pixels.image, pixels.dtype, tokenizer.clone());
        let text = |target: &_| tokenizer.encode(target);
        images(config, pixels, text, move |texts: &[&ImageText], pixels, device| {
            let sequences: Vec<[Vec<i64>; 2]> = texts.iter().map(|text| of_batch.sequence(text)).collect();
            LlavaBatch::new(&sequences, pixels, image, dtype, device)
        })
    }

    fn complete(config: &ModuleConfig, sizes: &LlavaConfig, exported: &Path) -> Result<(), TrainError> {
        if let Some(folder) = &config.model.hf {
            copy_small_files(folder, exported)?;
        }
        save_tokenizer(config, exported)?;
        pixels(config, sizes)?.export(config, exported)
    }
}

fn tokenizer_file(config: &ModuleConfig) -> PathBuf {
    PathBuf::from(config.data.tokenizer.as_deref().unwrap_or_default())
}

fn tokenizer(config: &ModuleConfig, sizes: &LlavaConfig) -> Result<ImageTokenizer, TrainError> {
    let (path, image) = (tokenizer_file(config), (sizes.image_token_index, sizes.image_tokens()));
    let template = config.images.template.as_deref();
    let opened = ImageTokenizer::open(&path, template, image, config.training.seq_length);
    let opened = opened.map_err(|error| TrainError::Module(error.to_string()))?;
    let (tokens, vocabulary) = (opened.tokenizer().get_vocab_size(true), sizes.text_config.vocab_size);
    if tokens > vocabulary {
        let advice = "name the tokenizer of the model".into();
        return Err(TrainError::Vocabulary { path, tokens, vocabulary, advice });
    }
    Ok(opened)
}

fn pixels(config: &ModuleConfig, sizes: &LlavaConfig) -> Result<Pixels, TrainError> {
    let size = sizes.vision_config.image_size;
    let both = json!({"height": size, "width": size});
    let default = match sizes.vision_config.family {
        VisionFamily::Clip => json!({
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": size},
            "crop_size": both,
        }),
        VisionFamily::Siglip => json!({"image_processor_type": "SiglipImageProcessor", "size": both}),
    };
    Pixels::of(config, [sizes.vision_config.num_channels, size], &default)
}
