//! GPT-2 and 3: layer norms with biases, learned positions, GELU, biases everywhere.

mod config;
mod family;
mod hf;

pub use config::GptConfig;

use crate::decoder::Decoder;

/// A rank's part of a GPT.
///
/// ```
/// use backend_dist::launch::{BoxError, Rank};
/// use burn::tensor::{Device, FloatDType, Int, Tensor};
/// use models::{CausalLm, Gpt, GptConfig, ParamBuilder};
///
/// let rank = Rank::single(Device::flex());
/// let model = Gpt::build(&GptConfig::tiny(), ParamBuilder::new(&rank, FloatDType::F32, 1))?;
/// let logits = model.logits(Tensor::<2, Int>::from_data([[1, 2, 3]], &rank.device));
/// assert_eq!(logits.dims(), [1, 3, 256]);
/// # Ok::<(), BoxError>(())
/// ```
pub type Gpt = Decoder<GptConfig>;
