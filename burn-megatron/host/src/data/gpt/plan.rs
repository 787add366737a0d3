//! How many epochs a number of samples takes, and how the last epoch is treated.

use super::GptOptions;

/// The arithmetic of `GPTDataset`, without any document.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochPlan {
    /// Tokens in all documents together.
    pub tokens_per_epoch: u64,
    /// How often each document is used.
    pub epochs: u64,
    /// Samples that lie entirely in the epochs before the last, when that one is shuffled apart.
    ///
    /// Megatron does so when less than 80 % of the last epoch is needed, so that what is left out is spread over the
    /// documents and no document of the earlier epochs is lost.
    pub shuffled_apart: Option<usize>,
    /// Samples altogether; at least as many as were asked for.
    pub samples: usize,
}

impl EpochPlan {
    pub(super) fn new(tokens_per_epoch: u64, options: &GptOptions) -> Result<Self, String> {
        let seq = options.seq_length as u64;
        if seq == 0 {
            return Err("a sequence length of 0; at least 1 is needed".into());
        }
        let wanted = options.num_samples.map(|samples| samples as u64);
        if tokens_per_epoch == 0 {
            return match wanted {
                None | Some(0) => Ok(Self { tokens_per_epoch, epochs: 0, shuffled_apart: None, samples: 0 }),
                Some(wanted) => Err(format!("{wanted} samples are wanted of no tokens")),
            };
        }
        let epochs = match wanted {
            None => 1,
            Some(wanted) => {
                let tokens = wanted.checked_mul(seq).ok_or_else(|| format!("{wanted} samples are too many"))? + 1;
                tokens.div_ceil(tokens_per_epoch)
            }
        };
        let tokens = epochs * tokens_per_epoch;
        // The ceiling is taken in single precision because Megatron's is; a sample more or less changes the order.
        let samples = match options.drop_last {
            true => (tokens - 1) / seq,
            false => ((tokens - 1) as f32 / seq as f32).ceil() as u64,
        };
        if samples >= u64::from(u32::MAX) - 1 {
            return Err(format!("{samples} samples; at most {} can be indexed, use longer sequences", u32::MAX - 2));
        }
        let before_last = ((epochs - 1) * tokens_per_epoch).saturating_sub(1) / seq;
        let per_epoch = (tokens_per_epoch - 1) / seq;
        let from_last = wanted.unwrap_or(0).saturating_sub(before_last);
        let apart = epochs > 1 && from_last < (0.80 * per_epoch as f64) as u64;
        let shuffled_apart = apart.then_some(before_last as usize);
        Ok(Self { tokens_per_epoch, epochs, shuffled_apart, samples: samples as usize })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(tokens: u64, seq_length: usize, num_samples: Option<usize>, drop_last: bool) -> EpochPlan {
        let (eod_mask_loss, eod_documents, cache) = Default::default();
        let options = GptOptions { seq_length, num_samples, seed: 0, drop_last, eod_mask_loss, eod_documents, cache };
        EpochPlan::new(tokens, &options).unwrap()
    }

    #[test]
    fn one_more_token_than_the_samples_is_needed() {
        assert_eq!(plan(101, 10, Some(10), true).epochs, 1);
        assert_eq!(plan(100, 10, Some(10), true).epochs, 2);
        assert_eq!(plan(100, 10, None, true).samples, 9);
        assert_eq!(plan(100, 10, None, false).samples, 10);
        assert_eq!(plan(91, 10, None, false).samples, 9);
    }

    #[test]
    fn a_little_used_last_epoch_is_shuffled_apart() {
        // 100 samples per epoch: 79 from the second epoch are apart, 80 are not.
        assert_eq!(plan(1001, 10, Some(179), true).shuffled_apart, Some(100));
        assert_eq!(plan(1001, 10, Some(180), true).shuffled_apart, None);
        assert_eq!(plan(1001, 10, Some(100), true).shuffled_apart, None);
    }

    #[test]
    fn no_tokens_means_no_samples_or_an_error() {
        assert_eq!(plan(0, 10, None, true).samples, 0);
        let options = GptOptions {
            seq_length: 4,
            num_samples: Some(1),
            seed: 0,
            drop_last: true,
            eod_mask_loss: None,
            eod_documents: None,
            cache: None,
        };
        assert!(EpochPlan::new(0, &options).is_err());
    }
}
