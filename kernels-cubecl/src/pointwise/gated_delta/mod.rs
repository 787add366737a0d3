//! What is between the GEMMs of the gated delta rule in chunks (Yang, Kautz, Hatamizadeh, arXiv 2412.06464, section 3.3),
//! forward and backward.
//!
//! Sizes and orders of dimensions are those of [state-space duality](super::ssd), whose kernels arrange operands and
//! decays: heads are those of values, of `p` features, and groups those of keys, of `n` features. The layer has `[q k v]`
//! as `[s, b, 2 g n + h p]`, and states are `[b, c, h, p, n]`: as `[b, c, g, h/g p, n]` they are a group's operand.
//! GEMMs compute, for each head of a chunk,
//! - `U = T diag(β) V` and `W = −T diag(β since) K`, with `T = (I + tril(diag(β) K Kᵀ ∘ decay, −1))⁻¹` (`systems`);
//! - `V' = U + W S`, the values after what the state answers is taken off (`states`);
//! - the answers `since Q S + (Q Kᵀ ∘ decay) V'`.
pub mod gates_gradient;
pub mod head_dots;
pub mod inverse_gradient;
pub mod states;
pub mod systems;
pub mod systems_gradient;
pub mod units;

use super::ssd::arrange::Features;
use super::ssd::{Form, SsdShape};
use super::{PointwiseError, check};
use crate::pointwise::sigmoid::sigmoid;
use cubecl::prelude::*;

/// Most positions of a chunk.
const MOST_POSITIONS: usize = 64;

impl SsdShape {
    /// The features of queries, keys and values in `[s, b, q k v]`.
    pub fn queries_keys_values(&self) -> [Features; 3] {
        let (width, keys) = (self.width(), self.groups * self.state);
        let of_keys = |first| Features { width, first, heads: self.groups, groups: self.groups, head_dim: self.state };
        [of_keys(0), of_keys(keys), Features { first: 2 * keys, ..self.x() }]
    }

    /// Whether this device has kernels of the gated delta rule for this shape.
    pub fn has_delta_kernel(&self, client: &Client) -> bool {
        let shared = client.properties().hardware.max_shared_memory_size;
        let form = self.form(false);
        self.check_delta().is_ok() && states::shared_bytes(form).max(systems_gradient::shared_bytes(form)) <= shared
    }

    pub(in crate::pointwise) fn check_delta(&self) -> Result<(), PointwiseError> {
        self.check()?;
        check("features of a key", self.state, 8, 256)?;
        check("positions of a chunk", self.chunk, 8, MOST_POSITIONS)?;
        if !self.state.is_power_of_two() {
            return Err(PointwiseError::Shape { shape: format!("{self:?}") });
        }
        Ok(())
    }
}

/// How far a key's answer moves towards its value, β, of position `t`; padding does not move it.
#[cube]
fn beta<E: Float>(raw: &[E], t: u32, sample: u32, head: u32, seq: u32, samples: u32, #[comptime] form: Form) -> f32 {
    let mut beta = 0.0f32;
    if t < seq {
        beta = sigmoid(f32::cast_from(raw[((t * samples + sample) * comptime![form.heads] + head) as usize]));
    }
    beta
}
