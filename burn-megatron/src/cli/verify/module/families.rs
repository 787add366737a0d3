//! The families, in the sizes of the flags. Initial weights of vision models are large enough that attention is not uniform:
//! else the gradient of a key's bias would be nothing but rounding.

use std::ops::Range;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use burn::tensor::Device;
use models::hf::HfModule;
use models::images::{ClipVisionConfig, Llava, LlavaConfig, Vit, VitConfig};
use models::{Bert, BertConfig, LlamaConfig, T5, T5Config};

use super::{Args, Compared, Sizes, adapted, batches, layouts};
use crate::learner::{BertTraining, LlavaTraining, T5Training, VitTraining};

const STD: f64 = 0.1;
/// Height and width of an image, and of a patch.
const IMAGE: [usize; 2] = [8, 4];
/// Channels, and height and width.
const PIXELS: [usize; 2] = [3, IMAGE[0]];
const CLASSES: usize = 7;

pub(super) fn bert(args: &Args, sizes: &Sizes) -> Result<ExitCode> {
    let Sizes { layers, hidden, ffn, heads, vocab, seq, .. } = *sizes;
    let config = BertConfig {
        vocab_size: vocab,
        hidden_size: hidden,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        intermediate_size: ffn,
        max_position_embeddings: seq,
        ..Bert::without_dropout(BertConfig::base())
    };
    let make = |device: &Device| Ok(BertTraining { bert: adapted(Bert::new(&config, device), args.lora)? });
    let batch = move |items: Range<usize>, device: &Device| batches::bert(items, [seq, vocab], device);
    layouts(args, &Compared::of_texts(sizes, layers), &make, batch, &Bert::plan())
}

pub(super) fn t5(args: &Args, sizes: &Sizes) -> Result<ExitCode> {
    let Sizes { layers, hidden, ffn, heads, vocab, seq, .. } = *sizes;
    let config = T5Config {
        vocab_size: vocab,
        d_model: hidden,
        d_kv: hidden / heads,
        d_ff: ffn,
        num_layers: layers,
        num_decoder_layers: layers,
        num_heads: heads,
        ..T5::without_dropout(T5Config::small())
    };
    let make = |device: &Device| Ok(T5Training { t5: adapted(T5::new(&config, device), args.lora)? });
    let batch = move |items: Range<usize>, device: &Device| batches::t5(items, [seq, vocab], device);
    layouts(args, &Compared::of_texts(sizes, 2 * layers), &make, batch, &T5::plan())
}

pub(super) fn vit(args: &Args, sizes: &Sizes) -> Result<ExitCode> {
    let Sizes { layers, hidden, ffn, heads, .. } = *sizes;
    let config = VitConfig {
        hidden_size: hidden,
        intermediate_size: ffn,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        image_size: IMAGE[0],
        patch_size: IMAGE[1],
        num_channels: PIXELS[0],
        num_labels: Some(CLASSES),
        initializer_range: STD,
        ..VitConfig::tiny()
    };
    let compared = Compared {
        blocks: layers,
        shared: vec![heads, ffn],
        model: format!("{layers} blocks of {heads} heads, {CLASSES} classes"),
        items: format!("images of {0} x {0}", IMAGE[0]),
    };
    let make = |device: &Device| Ok(VitTraining { vit: adapted(Vit::new(&config, device), args.lora)? });
    let batch = move |items: Range<usize>, device: &Device| batches::vit(items, PIXELS, CLASSES, device);
    layouts(args, &compared, &make, batch, &Vit::plan())
}

pub(super) fn llava(args: &Args, sizes: &Sizes) -> Result<ExitCode> {
    let Sizes { layers, hidden, ffn, heads, kv_heads, vocab, seq } = *sizes;
    // As published, the decoder does not see the tower's last block.
    let vision_config = ClipVisionConfig {
        hidden_size: hidden,
        intermediate_size: ffn,
        num_hidden_layers: layers + 1,
        num_attention_heads: heads,
        image_size: IMAGE[0],
        patch_size: IMAGE[1],
        num_channels: PIXELS[0],
        initializer_range: STD,
        ..ClipVisionConfig::tiny()
    };
    let text_config = LlamaConfig {
        vocab_size: vocab,
        hidden_size: hidden,
        intermediate_size: ffn,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim: hidden / heads,
        max_position_embeddings: seq,
        initializer_range: STD,
        ..LlamaConfig::tiny()
    };
    let token = vocab - 1;
    let config = LlavaConfig {
        vision_config,
        text_config,
        image_token_index: token,
        feature_blocks: layers,
        ..LlavaConfig::tiny()
    };
    config.check().map_err(|error| anyhow!("--model llava: {error}"))?;
    let image_tokens = config.image_tokens();
    // A token before the image, and one to learn.
    let least = image_tokens + 2;
    if seq < least {
        bail!(
            "nothing to verify: --seq-length {seq}, an image alone has {image_tokens} tokens; nearest legal: {least}"
        );
    }
    let compared = Compared {
        shared: vec![heads, kv_heads, ffn, vocab],
        items: format!("sequences of {seq} tokens with an image each"),
        ..Compared::of_texts(sizes, 2 * layers)
    };
    let make = |device: &Device| Ok(LlavaTraining { llava: adapted(Llava::new(&config, device), args.lora)? });
    let batch =
        move |items: Range<usize>, device: &Device| batches::llava(items, PIXELS, [seq, image_tokens, token], device);
    layouts(args, &compared, &make, batch, &Llava::plan())
}
