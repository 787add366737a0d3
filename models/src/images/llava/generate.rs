//! Generation from an image.

use burn::tensor::{Int, Tensor};

use super::LlavaConfig;
use super::decoder::KeyValues;
use super::model::Llava;
use crate::hf::{ImageInput, WritingModule};

/// Keys and values of each block.
#[derive(Clone, Debug)]
pub struct LlavaCache(Vec<Option<KeyValues>>);

impl Llava {
    /// The most probable tokens after `tokens [1, length]`, in which image tokens stand for `pixels [images, channels,
    /// image_size, image_size]`: until `end`, which is not among them, and at most `most`. Images and tokens are computed
    /// once; keys and values are kept.
    ///
    /// # Panics
    /// If there are several sequences, or not as many image tokens as the images have features.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor};
    /// use models::images::{Llava, LlavaConfig};
    ///
    /// let (config, device) = (LlavaConfig::tiny(), Device::flex());
    /// let tokens = Tensor::<2, Int>::from_data([[7, 255, 255, 255, 255, 8]], &device);
    /// let answer = Llava::new(&config, &device).generate(tokens, Tensor::ones([1, 3, 8, 8], &device), 5, 0);
    /// assert!(answer.len() <= 5 && answer.iter().all(|token| (1..256).contains(token)));
    /// ```
    pub fn generate(&self, tokens: Tensor<2, Int>, pixels: Tensor<4>, most: usize, end: usize) -> Vec<usize> {
        let (sequences, needed) = (tokens.dims()[0], pixels.dims()[0] * self.image_tokens());
        assert_eq!(sequences, 1, "`tokens` has {sequences} sequences; legal: 1");
        let is_image = tokens.clone().equal_elem(self.image_token() as i64).int();
        let found = is_image.sum().into_data().iter::<i64>().sum::<i64>();
        assert_eq!(found, needed as i64, "`tokens` has {found} image tokens; legal: {needed}, those of the images");
        let device = tokens.device();
        let (mut cache, mut logits) = self.read(tokens, Some(pixels));
        let mut found = Vec::new();
        while found.len() < most {
            let next = logits.argmax(1).into_data().iter::<i64>().next().unwrap_or(0);
            if next as usize == end {
                break;
            }
            found.push(next as usize);
            logits = self.extend(Tensor::from_data([[next]], &device), &mut cache);
        }
        found
    }

    /// Logits `[1, vocabulary]` after `x [1, length, hidden]`, which follows what the cache has.
    fn after(&self, x: Tensor<3>, cache: &mut LlavaCache) -> Tensor<2> {
        let decoder = self.decoder();
        let blocks = cache.0.iter_mut().enumerate();
        let x = blocks.fold(x, |x, (index, past)| decoder.block_after(index, x, past));
        let last = x.dims()[1] - 1;
        decoder.logits(x.narrow(1, last, 1)).squeeze_dim(1)
    }
}

impl WritingModule for Llava {
    type Cache = LlavaCache;

    fn vocabulary(config: &LlavaConfig) -> usize {
        config.text_config.vocab_size
    }

    fn images(config: &LlavaConfig) -> Option<ImageInput> {
        let image = [config.vision_config.num_channels, config.vision_config.image_size];
        Some(ImageInput { token: config.image_token_index, tokens: config.image_tokens(), image })
    }

    fn read(&self, prompt: Tensor<2, Int>, images: Option<Tensor<4>>) -> (LlavaCache, Tensor<2>) {
        let x = match images {
            Some(pixels) => self.embed(prompt, self.image_features(pixels)),
            None => self.decoder().embed(prompt),
        };
        let mut cache = LlavaCache(vec![None; self.decoder().blocks()]);
        let logits = self.after(x, &mut cache);
        (cache, logits)
    }

    fn extend(&self, token: Tensor<2, Int>, cache: &mut LlavaCache) -> Tensor<2> {
        self.after(self.decoder().embed(token), cache)
    }
}
