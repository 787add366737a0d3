//! Greedy generation from an image.

use burn::tensor::{Int, Tensor};

use super::decoder::KeyValues;
use super::model::Llava;

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
        let (device, decoder) = (tokens.device(), self.decoder());
        let (sequences, needed) = (tokens.dims()[0], pixels.dims()[0] * self.image_tokens());
        assert_eq!(sequences, 1, "`tokens` has {sequences} sequences; legal: 1");
        let is_image = tokens.clone().equal_elem(self.image_token() as i64).int();
        let found = is_image.sum().into_data().iter::<i64>().sum::<i64>();
        assert_eq!(found, needed as i64, "`tokens` has {found} image tokens; legal: {needed}, those of the images");
        let mut past: Vec<Option<KeyValues>> = vec![None; decoder.blocks()];
        let mut x = self.embed(tokens, self.image_features(pixels));
        let mut found = Vec::new();
        while found.len() < most {
            for (index, past) in past.iter_mut().enumerate() {
                x = decoder.block_after(index, x, past);
            }
            let last = x.dims()[1] - 1;
            let next = decoder.logits(x.narrow(1, last, 1)).argmax(2).into_data().iter::<i64>().next().unwrap_or(0);
            if next as usize == end {
                break;
            }
            found.push(next as usize);
            x = decoder.embed(Tensor::from_data([[next]], &device));
        }
        found
    }
}
