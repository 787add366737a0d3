//! Chains of elementwise operations and reductions over rows as one kernel, compiled for the chain.
//!
//! A [`Program`] is what a chain computes. Its kernel reads every input once, keeps everything between in registers, and
//! writes the outputs once: a softmax with what comes before it, LayerNorm and its gradient, an optimizer's update. Sums over all
//! rows, as gradients of biases are, are outputs too: each cube adds up the rows that it takes, and a second kernel these sums.

mod draw;
mod evaluate;
mod program;

#[cfg(feature = "cuda")]
mod kernel;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod math;
#[cfg(feature = "cuda")]
mod plan;
#[cfg(feature = "cuda")]
mod row;

pub use draw::{Draw, Part};
#[cfg(feature = "cuda")]
pub(crate) use draw::{draw_words, four_draws};
#[cfg(feature = "cuda")]
pub use launch::launch;
#[cfg(feature = "cuda")]
pub use plan::{MOST, Plan};
pub use program::{
    Binary, Element, Extent, Input, Output, Program, Reduce, Register, Sharing, Step, Unary, row_fits,
    rows_can_be_summed,
};
