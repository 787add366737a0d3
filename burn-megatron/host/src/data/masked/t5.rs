//! Megatron's `T5MaskedWordPieceDataset` (`megatron/core/datasets/t5_dataset.py`): spans become sentinels, and the output
//! says what they were.

use super::dataset::{MaskedDataset, SampleOptions};
use super::mapping::{Mapping, SampleSentences};
use super::masking::{Masked, Masking};
use super::{MaskedError, Result};
use crate::data::numpy::RandomState;

/// Stands for a position of the output that does not count.
const NO_LABEL: i64 = -1;

/// How samples are made.
#[derive(Clone, Debug, PartialEq)]
pub struct T5Options {
    /// Tokens of the encoder's input.
    pub seq_length: usize,
    /// Tokens of the decoder's output.
    pub decoder_seq_length: usize,
    /// Samples wanted; `None` is one epoch.
    pub num_samples: Option<usize>,
    /// At least 1.
    pub seed: u32,
    /// Share of samples that are truncated to a random shorter length.
    pub short_sequence_probability: f64,
    /// Which tokens are masked.
    pub masking: Masking,
    /// Stands for the first span, the second, and so on (`<extra_id_0>`); a sample needs as many as it has spans.
    pub sentinels: Vec<i64>,
    /// The decoder begins with it.
    pub bos: i64,
    /// Ends the output.
    pub eos: i64,
}

impl T5Options {
    /// As Megatron's `pretrain_t5.py` has them by default: 15 % of the tokens in whole words, spans of up to ten words from a
    /// geometric distribution, a tenth of the samples short.
    pub fn new(
        [seq_length, decoder_seq_length]: [usize; 2],
        seed: u32,
        sentinels: Vec<i64>,
        [bos, eos]: [i64; 2],
    ) -> Self {
        let masking =
            Masking { probability: 0.15, max_ngram: 10, whole_words: true, favor_long: false, geometric: true };
        let (num_samples, short_sequence_probability) = (None, 0.1);
        Self {
            seq_length,
            decoder_seq_length,
            num_samples,
            seed,
            short_sequence_probability,
            masking,
            sentinels,
            bos,
            eos,
        }
    }
}

impl SampleOptions for T5Options {
    fn check(&self) -> Result<()> {
        self.masking.check()?;
        super::check_order(self.seed, self.short_sequence_probability)?;
        let refuse =
            |name, value: usize, legal: String| Err(MaskedError::Option { name, value: value.to_string(), legal });
        if self.seq_length < 4 {
            return refuse("seq_length", self.seq_length, "4".into());
        }
        // How many spans the masked tokens of a sample make, only the sample says.
        if self.sentinels.is_empty() {
            return refuse("sentinels", 0, "1".into());
        }
        if self.decoder_seq_length < 3 {
            let legal = "3: a sentinel, a token, and the token that begins or ends them".into();
            return refuse("decoder_seq_length", self.decoder_seq_length, legal);
        }
        Ok(())
    }

    fn mapping(&self) -> Mapping {
        Mapping {
            num_samples: self.num_samples,
            max_length: self.seq_length - 2,
            short_sequence_probability: self.short_sequence_probability,
            seed: self.seed,
            min_sentences: 1,
        }
    }
}

/// A sample; the first two lists have the encoder's length, the others the decoder's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct T5Sample {
    /// The tokens with sentinels for spans, and padding.
    pub encoder: Vec<i64>,
    /// 1, and 0 at padding.
    pub encoder_mask: Vec<i64>,
    /// The first token, then each sentinel with its span, and padding.
    pub decoder: Vec<i64>,
    /// Each sentinel with its span, the last token; -1 at padding.
    pub labels: Vec<i64>,
    /// Whether tokens were cut off.
    pub truncated: bool,
}

/// Samples of [`T5Options`].
pub type T5Dataset = MaskedDataset<T5Options>;

impl T5Dataset {
    /// The sample at an index.
    ///
    /// # Errors
    /// When the `.bin` file can no longer be read, or has a token that is not in the vocabulary, or what is masked needs more
    /// sentinels or a longer output than there are.
    ///
    /// # Panics
    /// When `index` is not below [`len`](Self::len).
    pub fn sample(&self, index: usize) -> Result<T5Sample> {
        let SampleSentences { sentences, target } = self.samples[index].clone();
        let mut random = RandomState::new(self.options.seed.wrapping_add(index as u32));
        let mut tokens = super::read(&self.sentences, sentences, &self.vocabulary)?;
        let truncated = tokens.len() > target;
        tokens.truncate(target);
        let mask = |_: &mut RandomState| Some(self.vocabulary.mask);
        let masked = self.options.masking.mask(&tokens, target, &self.vocabulary, &mut random, mask);
        let T5Options { decoder_seq_length: length, sentinels, .. } = &self.options;
        let (spans, sentinels, length) = (masked.spans.len(), sentinels.len(), *length);
        let needed = 1 + spans + masked.spans.iter().map(Vec::len).sum::<usize>();
        if spans > sentinels || needed > length {
            return Err(MaskedError::Output { index, spans, tokens: needed, sentinels, length });
        }
        Ok(self.assemble(&tokens, &masked, truncated))
    }

    fn assemble(&self, tokens: &[i64], masked: &Masked, truncated: bool) -> T5Sample {
        let T5Options { seq_length, decoder_seq_length, sentinels, bos, eos, .. } = &self.options;
        let (mut encoder, mut spans, mut after) = (Vec::new(), Vec::new(), 0);
        for (span, sentinel) in masked.spans.iter().zip(sentinels) {
            // Spans of words may lie within each other's gaps; Megatron splits where a span begins and ends.
            encoder.extend(masked.tokens.get(after..span[0]).unwrap_or_default());
            encoder.push(*sentinel);
            spans.push(*sentinel);
            spans.extend(span.iter().map(|position| tokens[*position]));
            after = span[span.len() - 1] + 1;
        }
        encoder.extend(&masked.tokens[after..]);
        let (mut decoder, mut labels) = ([&[*bos], &spans[..]].concat(), [&spans[..], &[*eos]].concat());
        let pad = self.vocabulary.pad;
        encoder.resize(*seq_length, pad);
        decoder.resize(*decoder_seq_length, pad);
        labels.resize(*decoder_seq_length, NO_LABEL);
        let encoder_mask = encoder.iter().map(|token| i64::from(*token != pad)).collect();
        T5Sample { encoder, encoder_mask, decoder, labels, truncated }
    }
}
