//! Mamba-2's recurrence as one autograd node: state-space duality in chunks of positions (Dao, Gu, arXiv 2405.21060,
//! section 6 and listing 1). GEMMs are those of the backend, and `stages` is what is between them.
//!
//! A head's state `S [n, p]` answers `C` with `Sᵀ C`. At each position it decays and takes up the position's value:
//! `S ← exp(Δ A) S + B (Δ x)ᵀ`. Heads of a group share B and C, so the GEMMs with the state are those of a group, whose
//! heads are columns. Saved for the backward pass are the inputs and the states in front of chunks; the rest is
//! recomputed.

pub(super) mod algorithm;
pub(super) mod node;
pub(super) mod stages;

use burn::tensor::Tensor;

use super::operation::{Tensors, apply_with};
use super::secondary_outputs::{SecondaryOutputs, secondary_output};
use node::Ssd;

/// The heads of a layer, or of a rank's part of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SsdHeads {
    /// Heads, each with a state.
    pub heads: usize,
    /// Groups of heads that share B and C.
    pub groups: usize,
    /// Features of a head, p.
    pub head_dim: usize,
    /// Features of B and of C in a group, n.
    pub state: usize,
    /// Smallest and largest step size Δ, after softplus.
    pub step_limit: [f64; 2],
}

impl SsdHeads {
    /// Features of x, of B and of C in this order.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim + 2 * self.groups * self.state
    }
}

/// The tensors of [`ssd`].
#[derive(Clone, Debug)]
pub struct SsdInputs {
    /// x, B and C, `[s, b, heads p + 2 groups n]`.
    pub x: Tensor<3>,
    /// Step sizes before their bias and softplus, `[s, b, heads]`.
    pub dt: Tensor<3>,
    /// Their biases, `[heads]`.
    pub dt_bias: Tensor<1>,
    /// Logarithm of each head's rate of forgetting, −A, `[heads]`.
    pub a_log: Tensor<1>,
    /// What of x each head adds to its answers, D, `[heads]`.
    pub skip: Tensor<1>,
    /// The number of positions of the same document in front of each position, `[s, b]`: states are zero wherever a
    /// document begins. No gradient flows into it.
    pub ages: Option<Tensor<2>>,
}

/// The states' answers and D x, `[s, b, heads p]`, of states that are zero in front of the sequence.
///
/// # Panics
///
/// If sizes do not fit.
pub fn ssd(inputs: SsdInputs, heads: SsdHeads) -> Tensor<3> {
    issue(inputs, heads, None, None)
}

/// [`ssd`] behind the states `first [b, groups, n, heads/groups p]`, without documents, and the states behind the last
/// position. No gradient flows through states.
///
/// # Panics
///
/// If sizes do not fit.
pub fn ssd_with_states(inputs: SsdInputs, heads: SsdHeads, first: Option<Tensor<4>>) -> (Tensor<3>, Tensor<4>) {
    let last = SecondaryOutputs::new(1);
    let y = issue(inputs, heads, first, Some(last.clone()));
    let last = secondary_output(&y, &last, 0);
    (y, last)
}

fn issue(inputs: SsdInputs, heads: SsdHeads, first: Option<Tensor<4>>, last: Option<SecondaryOutputs>) -> Tensor<3> {
    let SsdInputs { x, dt, dt_bias, a_log, skip, ages } = inputs;
    let ([seq, samples, width], count) = (x.dims(), heads.heads);
    let of_heads = [&dt_bias, &a_log, &skip].map(|of| of.dims());
    let fits = width == heads.width() && dt.dims() == [seq, samples, count] && of_heads == [[count]; 3];
    assert!(fits, "ssd: x is {:?}, the steps are {:?}, per head {of_heads:?}: not {heads:?}", x.dims(), dt.dims());
    assert!(heads.groups > 0 && count % heads.groups == 0, "ssd: {} groups do not divide {count} heads", heads.groups);
    if let Some(ages) = &ages {
        assert_eq!(ages.dims(), [seq, samples], "ssd: ages of other positions than [{seq}, {samples}]");
    }
    let operation = Ssd { heads, divided: ages.is_some(), last };
    let constants = ages.map(Tensor::into_dispatch).into_iter().chain(first.map(Tensor::into_dispatch));
    let [dt_bias, a_log, skip] = [dt_bias, a_log, skip].map(Tensor::into_dispatch);
    let [x, dt] = [x, dt].map(Tensor::into_dispatch);
    apply_with(operation, [x, dt, dt_bias, a_log, skip], Tensors::floats(constants))
}

#[cfg(test)]
mod tests;
