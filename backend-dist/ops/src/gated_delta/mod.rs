//! The gated delta rule as one autograd node, in chunks of positions (Yang, Kautz, Hatamizadeh, arXiv 2412.06464, section
//! 3.3). GEMMs are those of the backend, and `stages` is what is between them.
//!
//! A head's state `S [n, p]` answers a query `q` with `Sᵀ q`. At each position it decays, and what it answers to the
//! position's key moves towards the position's value: `S ← α (I − β k kᵀ) S + β k vᵀ`. Value heads of a key head share its
//! queries and keys. Saved for the backward pass are the inputs; states are recomputed.

pub(super) mod algorithm;
pub(super) mod node;
pub(super) mod stages;

use burn::tensor::Tensor;

use super::operation::{Tensors, apply_with};
use super::secondary_outputs::{SecondaryOutputs, secondary_output};
use super::ssd::SsdHeads;
use node::GatedDelta;

/// The heads of a layer, or of a rank's part of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedDeltaHeads {
    /// Heads of queries and keys; each serves `value_heads / key_heads` value heads.
    pub key_heads: usize,
    /// Heads of values, each with a state.
    pub value_heads: usize,
    /// Features of a query or key head, n.
    pub key_dim: usize,
    /// Features of a value head, p.
    pub value_dim: usize,
}

impl GatedDeltaHeads {
    /// Features of queries, keys and values in this order.
    pub fn width(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// The same sizes of state-space duality, whose groups are key heads.
    fn ssd(self) -> SsdHeads {
        let Self { key_heads, value_heads, key_dim, value_dim } = self;
        let step_limit = [0.0, f64::INFINITY];
        SsdHeads { heads: value_heads, groups: key_heads, head_dim: value_dim, state: key_dim, step_limit }
    }
}

/// The tensors of [`gated_delta`].
#[derive(Clone, Debug)]
pub struct GatedDeltaInputs {
    /// Queries, keys and values, `[s, b, 2 key heads n + value heads p]`. Queries and keys are divided by their length.
    pub x: Tensor<3>,
    /// β before its sigmoid, `[s, b, value heads]`.
    pub beta: Tensor<3>,
    /// Step sizes before their bias and softplus, `[s, b, value heads]`.
    pub dt: Tensor<3>,
    /// Their biases, `[value heads]`.
    pub dt_bias: Tensor<1>,
    /// Logarithm of each head's rate of forgetting, `[value heads]`.
    pub a_log: Tensor<1>,
    /// The number of positions of the same document in front of each position, `[s, b]`: states are zero wherever a
    /// document begins. No gradient flows into it.
    pub ages: Option<Tensor<2>>,
}

/// The states' answers to queries, divided by the root of their features, `[s, b, value heads p]`, of states that are zero
/// in front of the sequence.
///
/// # Panics
///
/// If sizes do not fit.
pub fn gated_delta(inputs: GatedDeltaInputs, heads: GatedDeltaHeads) -> Tensor<3> {
    issue(inputs, heads, None, None)
}

/// [`gated_delta`] behind the states `first [b, value heads, p, n]`, without documents, and the states behind the last
/// position. No gradient flows through states.
///
/// # Panics
///
/// If sizes do not fit.
pub fn gated_delta_with_states(
    inputs: GatedDeltaInputs,
    heads: GatedDeltaHeads,
    first: Option<Tensor<4>>,
) -> (Tensor<3>, Tensor<4>) {
    let last = SecondaryOutputs::new(1);
    let y = issue(inputs, heads, first, Some(last.clone()));
    let last = secondary_output(&y, &last, 0);
    (y, last)
}

fn issue(
    inputs: GatedDeltaInputs,
    heads: GatedDeltaHeads,
    first: Option<Tensor<4>>,
    last: Option<SecondaryOutputs>,
) -> Tensor<3> {
    let GatedDeltaInputs { x, beta, dt, dt_bias, a_log, ages } = inputs;
    let ([seq, samples, width], count) = (x.dims(), heads.value_heads);
    let (of_heads, of_positions) = ([&dt_bias, &a_log].map(|of| of.dims()), [&beta, &dt].map(|of| of.dims()));
    let fits = width == heads.width() && of_positions == [[seq, samples, count]; 2] && of_heads == [[count]; 2];
    assert!(
        fits,
        "gated_delta: x is {:?}, β and steps {of_positions:?}, per head {of_heads:?}: not {heads:?}",
        x.dims()
    );
    let divides = heads.key_heads > 0 && count % heads.key_heads == 0;
    assert!(divides, "gated_delta: {} key heads do not divide {count} value heads", heads.key_heads);
    if let Some(ages) = &ages {
        assert_eq!(ages.dims(), [seq, samples], "gated_delta: ages of other positions than [{seq}, {samples}]");
    }
    let operation = GatedDelta { heads, divided: ages.is_some(), last };
    let constants = ages.map(Tensor::into_dispatch).into_iter().chain(first.map(Tensor::into_dispatch));
    let [dt_bias, a_log] = [dt_bias, a_log].map(Tensor::into_dispatch);
    let [x, beta, dt] = [x, beta, dt].map(Tensor::into_dispatch);
    apply_with(operation, [x, beta, dt, dt_bias, a_log], Tensors::floats(constants))
}

#[cfg(test)]
mod tests;
