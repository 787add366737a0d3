//! Encoders and encoder-decoders: plain Burn modules, written for one device. Their layouts are those of any Burn module.

pub mod bert;
mod loss;
mod presets;
mod rms_norm;
mod single;
pub mod t5;

pub use bert::{Bert, BertConfig};
pub use loss::cross_entropy;
pub use presets::presets;
pub use rms_norm::RmsNorm;
pub(crate) use single::attention_weights;
pub use t5::{T5, T5Config};

use burn::tensor::{Bool, Tensor};

/// Which tokens pad their sequence, `[batch, length]`; without it, none.
pub type Padding = Option<Tensor<2, Bool>>;
