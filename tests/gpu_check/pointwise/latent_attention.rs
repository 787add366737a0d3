//! The sizes of DeepSeek-V3.
use super::bandwidths::Bandwidths;
use super::timings::TOKENS;
use half::bf16;
use kernels_cubecl::pointwise::columns::{self, ColumnRange};
use kernels_cubecl::pointwise::latent::{self, LatentShape};

/// The memory-bound kernels of DeepSeek-V3's attention.
pub fn all(clock: &Bandwidths) {
    let shape = LatentShape { tokens: TOKENS, batch: 1, heads: 128, rope_dim: 64, nope_dim: 128, value_dim: 128 };
    let heads = TOKENS * shape.heads;
    let half = |len| clock.half(len);
    let (kv, keys, values) = (half(heads * 256), half(heads * 192), half(heads * 128));
    let (shared, angles) = (half(TOKENS * 64), half(TOKENS * 32));
    let angles = || (angles.at(0), angles.at(1));
    let of = ColumnRange { rows: TOKENS, width: 2112, first: 0, columns: 1536 };
    let (x, part) = (half(TOKENS * of.width), half(TOKENS * of.columns));
    clock.time("latent keys", 2 * (heads * (128 + 192) + TOKENS * 128), |client, i| {
        latent::keys::<bf16>(client, kv.at(i), shared.at(i), angles(), keys.at(i), shape).expect("legal")
    });
    clock.time("latent keys, gradients", 2 * (heads * (192 + 128 + 256) + TOKENS * 128), |client, i| {
        let targets = [kv.at(i), shared.at(i)];
        latent::gradients::<bf16>(client, [keys.at(i), values.at(i)], angles(), targets, shape).expect("legal")
    });
    clock.time("column ranges", 4 * TOKENS * of.columns, |client, i| {
        columns::copy_out::<bf16>(client, x.at(i), part.at(i), of).expect("legal")
    });
}
