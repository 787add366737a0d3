//! Keys of latent attention.
use super::{Element, download, poisoned, random, report, upload};
use cubecl::prelude::*;
use kernels_cubecl::pointwise::latent::{self, LatentShape};

pub fn latent<E: Element>(client: &Client, shape: LatentShape) -> usize {
    let LatentShape { tokens, heads, shared, own, value } = shape;
    let (key, both) = (shared + own, own + value);
    let (kv, front) = (random(tokens * heads * both, 1), random(tokens * shared, 2));
    let (key_slopes, value_slopes) = (random(tokens * heads * key, 3), random(tokens * heads * value, 4));
    let mut keys = Vec::new();
    let (mut kv_gradient, mut gradient) = (Vec::new(), vec![0.0; tokens * shared]);
    for head in 0..tokens * heads {
        let token = head / heads * shared..(head / heads + 1) * shared;
        keys.extend_from_slice(&front[token.clone()]);
        keys.extend_from_slice(&kv[head * both..head * both + own]);
        let slopes = &key_slopes[head * key..(head + 1) * key];
        gradient[token].iter_mut().zip(slopes).for_each(|(sum, slope)| *sum += slope);
        kv_gradient.extend_from_slice(&slopes[shared..]);
        kv_gradient.extend_from_slice(&value_slopes[head * value..(head + 1) * value]);
    }
    let [kv, front, key_slopes, value_slopes] =
        [&kv, &front, &key_slopes, &value_slopes].map(|values| upload::<E>(client, values));
    let outputs = [keys.len(), kv_gradient.len(), gradient.len()].map(|len| poisoned::<E>(client, len));
    let [keys_on, kv_on, shared_on] = &outputs;
    latent::keys::<E>(client, &kv, &front, keys_on, shape).expect("legal");
    latent::gradients::<E>(client, [&key_slopes, &value_slopes], [kv_on, shared_on], shape).expect("legal");
    let name = format!("latent {} {tokens} × {heads} × ({shared} + {own}, {value})", E::NAME);
    let check = |what: &str, found, expected: &[f64]| {
        report(&format!("{name}, {what}"), &download::<E>(client, found), expected, E::LIMIT)
    };
    check("keys", keys_on, &keys)
        + check("gradient of keys and values", kv_on, &kv_gradient)
        + check("gradient of the shared key", shared_on, &gradient)
}
