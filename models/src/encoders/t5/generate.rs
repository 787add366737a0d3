//! Decoding: the encoder runs once, the decoder reads one token at a time.

use burn::tensor::{Int, Tensor, TensorData};

use super::config::T5Config;
use super::model::{T5, T5Cache};
use crate::encoders::Padding;
use crate::hf::WritingModule;

impl T5 {
    /// For each of `tokens [batch, sequence]` the most probable next token again and again, up to `most` of them or the
    /// first `end`, which is the last of a list.
    pub fn generate(&self, tokens: Tensor<2, Int>, padding: Padding, most: usize, end: usize) -> Vec<Vec<i64>> {
        let ([batch, _], device) = (tokens.dims(), tokens.device());
        let mut cache = self.cache(self.encode(tokens, padding.clone()), padding);
        let mut written: Vec<Vec<i64>> = vec![Vec::new(); batch];
        let mut last = vec![self.start_token as i64; batch];
        let is_over = |written: &[i64]| written.last() == Some(&(end as i64));
        for _ in 0..most {
            let logits = self.decode(Tensor::from_data(TensorData::new(last, [batch, 1]), &device), &mut cache);
            last = logits.argmax(2).into_data().iter::<i64>().collect();
            for (written, token) in written.iter_mut().zip(&last).filter(|(written, _)| !is_over(written)) {
                written.push(*token);
            }
            if written.iter().all(|written| is_over(written)) {
                break;
            }
        }
        written
    }
}

impl WritingModule for T5 {
    type Cache = T5Cache;

    fn vocabulary(config: &T5Config) -> usize {
        config.vocab_size
    }

    /// The decoder's start token: the text answers the prompt.
    fn before(&self, _: &[i64]) -> Vec<i64> {
        vec![self.start_token as i64]
    }

    /// The encoder reads the prompt, and the decoder its start token.
    fn read(&self, prompt: Tensor<2, Int>, _: Option<Tensor<4>>) -> (T5Cache, Tensor<2>) {
        let start = Tensor::full([1, 1], self.start_token as i64, &prompt.device());
        let mut cache = self.cache(self.encode(prompt, None), None);
        let logits = self.extend(start, &mut cache);
        (cache, logits)
    }

    fn extend(&self, token: Tensor<2, Int>, cache: &mut T5Cache) -> Tensor<2> {
        self.decode(token, cache).squeeze_dim(1)
    }
}
