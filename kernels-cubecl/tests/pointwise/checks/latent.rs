//! Keys of latent attention, and ranges of columns.
use super::{Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::columns::{self, ColumnRange};
use kernels_cubecl::pointwise::latent::{self, LatentShape};

pub fn keys<E: Element>(client: &Client, shape: LatentShape) -> usize {
    let LatentShape { tokens, batch, heads, rope_dim, nope_dim, value_dim } = shape;
    let (half, length, both) = (rope_dim / 2, rope_dim + nope_dim, nope_dim + value_dim);
    let (kv, shared) = (random(tokens * heads * both, 1), random(tokens * rope_dim, 2));
    let [cos, sin] = [3, 4].map(|seed| random(tokens / batch * half, seed));
    let (of_keys, of_values) = (random(tokens * heads * length, 5), random(tokens * heads * value_dim, 6));
    let (mut expected, mut of_kv, mut of_shared) = (vec![], vec![], vec![]);
    for token in 0..tokens {
        let (shared, angles) = (&shared[token * rope_dim..][..rope_dim], token / batch * half);
        let mut turned = vec![0.0; rope_dim];
        let mut sums = vec![0.0; rope_dim];
        for c in 0..half {
            let (cos, sin) = (cos[angles + c], sin[angles + c]);
            turned[c] = shared[c] * cos - shared[c + half] * sin;
            turned[c + half] = shared[c + half] * cos + shared[c] * sin;
            let sum = |c: usize| (0..heads).map(|head| of_keys[(token * heads + head) * length + c]).sum::<f64>();
            let (low, high) = (sum(c), sum(c + half));
            (sums[c], sums[c + half]) = (low * cos + high * sin, high * cos - low * sin);
        }
        for head in token * heads..(token + 1) * heads {
            expected.extend(&turned);
            expected.extend(&kv[head * both..][..nope_dim]);
            of_kv.extend(&of_keys[head * length + rope_dim..][..nope_dim]);
            of_kv.extend(&of_values[head * value_dim..][..value_dim]);
        }
        of_shared.extend(sums);
    }
    let [kv, shared, cos, sin, of_keys, of_values] =
        [&kv, &shared, &cos, &sin, &of_keys, &of_values].map(|values| upload::<E>(client, values));
    let [keys_found, kv_found, shared_found] =
        [expected.len(), of_kv.len(), of_shared.len()].map(|len| poisoned::<E>(client, len));
    latent::keys::<E>(client, &kv, &shared, (&cos, &sin), &keys_found, shape).expect("legal");
    let targets = [&kv_found, &shared_found];
    latent::gradients::<E>(client, [&of_keys, &of_values], (&cos, &sin), targets, shape).expect("legal");
    let name = format!("latent keys {}, {tokens} × {heads} × ({rope_dim} + {nope_dim} | {value_dim})", E::NAME);
    report(&name, &download::<E>(client, &keys_found), &expected, E::LIMIT)
        + report("gradient of keys and values", &download::<E>(client, &kv_found), &of_kv, 0.0)
        + report("gradient of the shared key", &download::<E>(client, &shared_found), &of_shared, E::LIMIT)
}

/// Copied out, and copied into a tensor that has other columns.
pub fn columns<E: Element>(client: &Client, of: ColumnRange) -> usize {
    let ColumnRange { rows, width, first, columns } = of;
    let (x, y) = (random(rows * width, 1), random(rows * width, 2));
    let (mut part, mut whole) = (vec![], y.clone());
    for row in 0..rows {
        let place = row * width + first..row * width + first + columns;
        part.extend(&x[place.clone()]);
        whole[place.clone()].copy_from_slice(&x[place]);
    }
    let (x, y, found) = (upload::<E>(client, &x), upload::<E>(client, &y), poisoned::<E>(client, part.len()));
    columns::copy_out::<E>(client, &x, &found, of).expect("legal");
    columns::copy_in::<E>(client, &found, &y, of).expect("legal");
    report(&format!("columns {}, {rows} × {columns} of {width}", E::NAME), &download::<E>(client, &found), &part, 0.0)
        + report("put back", &download::<E>(client, &y), &whole, 0.0)
}
