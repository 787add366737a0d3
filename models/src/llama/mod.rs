//! Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases; and its relatives, which `variant` tells apart.

mod architecture;
mod block;
mod config;
mod family;
mod gemma;
mod hf;
mod olmo;
mod phi;
mod presets;
mod published;
mod qwen;
mod variant;

pub use config::LlamaConfig;
pub use variant::LlamaVariant;

use crate::decoder::Decoder;

/// A rank's part of a Llama or one of its relatives.
///
/// ```
/// use backend_dist::launch::{BoxError, Rank};
/// use burn::tensor::{Device, FloatDType, Int, Tensor};
/// use models::{CausalLm, Llama, LlamaConfig, ParamBuilder};
///
/// let rank = Rank::single(Device::flex());
/// let model = Llama::build(&LlamaConfig::tiny(), ParamBuilder::new(&rank, FloatDType::F32, 1))?;
/// let logits = model.logits(Tensor::<2, Int>::from_data([[1, 2, 3]], &rank.device));
/// assert_eq!(logits.dims(), [1, 3, 256]);
/// # Ok::<(), BoxError>(())
/// ```
pub type Llama = Decoder<LlamaConfig>;
