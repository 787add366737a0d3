//! T5 (Raffel et al. 2019, arXiv:1910.10683): an encoder and a decoder with relative positions, versions 1.0 and 1.1.

mod attention;
mod config;
mod feed_forward;
mod generate;
mod hf;
mod model;
mod positions;

pub use attention::{KeysValues, T5Attention};
pub use config::{T5Config, T5FeedForwardKind};
pub use feed_forward::{T5FeedForward, T5Gated, T5Inner};
pub use model::{T5, T5Cache, T5Decoder, T5DecoderBlock, T5Encoder, T5EncoderBlock};
pub use positions::{T5Positions, relative_position_bucket};
