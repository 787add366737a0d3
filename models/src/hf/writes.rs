//! Plain Burn modules that write text.

use burn::tensor::{Int, Tensor};

use super::HfModule;

/// What a model takes in place of image tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageInput {
    /// The token that stands for one feature of an image.
    pub token: usize,
    /// Such tokens of one image.
    pub tokens: usize,
    /// Channels, and the height and width, of an image.
    pub image: [usize; 2],
}

/// A plain Burn module that writes tokens, one after the other.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use models::hf::WritingModule;
/// use models::{T5, T5Config};
///
/// let device = Device::flex();
/// let config = T5Config { vocab_size: 40, d_model: 16, d_kv: 8, d_ff: 32, num_heads: 2, ..T5Config::small() };
/// let model = T5::new(&config, &device);
/// let (mut cache, logits) = model.read(Tensor::<2, Int>::from_data([[5, 6, 7, 1]], &device), None);
/// assert_eq!(logits.dims(), [1, 40]);
/// let next = model.extend(logits.argmax(1), &mut cache);
/// assert_eq!(next.dims(), [1, 40]);
/// ```
pub trait WritingModule: HfModule {
    /// What it keeps of what it has read.
    type Cache;

    /// Tokens of its vocabulary.
    fn vocabulary(config: &Self::Config) -> usize;

    /// The images that it reads, if it does.
    fn images(_config: &Self::Config) -> Option<ImageInput> {
        None
    }

    /// The tokens in front of the first that is written: those of the prompt, which the text continues.
    fn before(&self, prompt: &[i64]) -> Vec<i64> {
        prompt.to_vec()
    }

    /// Reads `prompt [1, length]`, whose image tokens stand for the features of `images [count, channels, height, width]`.
    /// Gives the logits `[1, vocabulary]` of the first token that is written.
    fn read(&self, prompt: Tensor<2, Int>, images: Option<Tensor<4>>) -> (Self::Cache, Tensor<2>);

    /// Reads the `token [1, 1]` that was written last, and gives the logits `[1, vocabulary]` of the next one.
    fn extend(&self, token: Tensor<2, Int>, cache: &mut Self::Cache) -> Tensor<2>;
}
