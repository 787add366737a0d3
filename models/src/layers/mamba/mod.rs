//! Mamba-2: a linear recurrence whose state forgets by a factor that depends on the token, one for each head.
//!
//! Dao, Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space Duality"
//! (arXiv 2405.21060), as Megatron-LM's `mamba_mixer.py` has it: values and the state's input and output vectors B and C
//! pass through a short causal convolution and SiLU; the output is gated and normalised, each group for itself, which
//! transformers' `modeling_mamba2.py` does in its kernels only.

mod layer;

pub use layer::{Mamba2Mixer, Mamba2MixerConfig};
