//! Convolutions `x [b, in, ..] * weight [out, in, ..] -> [b, out, ..]`, their gradients, and pooling.

use super::{Decision, Operand, is_strided, unary};
use crate::logical::Placement::{Partial, Replicate, Shard};

/// The dimensions of the operands.
const BATCH: usize = 0;
const CHANNELS: usize = 1;
const OUT: usize = 0;
const IN: usize = 1;

/// Forward. With `groups` other than one only the batch is sharded.
pub fn forward(x: Operand, weight: Operand, bias: Option<Operand>, groups: usize) -> Option<Decision> {
    if is_strided(&[x, weight]) {
        return None;
    }
    let decision = |x, weight, bias_at, out| {
        let mut inputs = vec![x, weight];
        inputs.extend(bias.map(|_| bias_at));
        Decision::new(inputs, out)
    };
    match (x.at, weight.at) {
        (Shard(BATCH), _) => decision(Shard(BATCH), Replicate, Replicate, Shard(BATCH)),
        (_, Shard(OUT)) if groups == 1 => decision(Replicate, Shard(OUT), Shard(0), Shard(CHANNELS)),
        (Shard(CHANNELS), _) | (_, Shard(IN)) if bias.is_some_and(|bias| bias.at.is_shard()) => None,
        // One rank adds the bias.
        (Shard(CHANNELS), _) | (_, Shard(IN)) if groups == 1 => decision(Shard(CHANNELS), Shard(IN), Partial, Partial),
        (Shard(_), _) | (_, Shard(_)) => None,
        _ if bias.is_some_and(|bias| bias.at.is_shard()) => None,
        _ => Decision::whole(2 + usize::from(bias.is_some())),
    }
}

/// The gradient of `x`, whose shape is read, from `weight` and `grad`.
pub fn x_backward(x: Operand, weight: Operand, grad: Operand, groups: usize) -> Option<Decision> {
    if is_strided(&[x, weight, grad]) {
        return None;
    }
    match (x.at, weight.at, grad.at) {
        (_, _, Shard(BATCH)) | (Shard(BATCH), ..) => {
            Decision::new([Shard(BATCH), Replicate, Shard(BATCH)], Shard(BATCH))
        }
        (_, Shard(OUT), _) | (_, _, Shard(CHANNELS)) if groups == 1 => {
            Decision::new([Replicate, Shard(OUT), Shard(CHANNELS)], Partial)
        }
        (_, Shard(IN), _) if groups == 1 => Decision::new([Shard(CHANNELS), Shard(IN), Replicate], Shard(CHANNELS)),
        (_, Shard(_), _) | (_, _, Shard(_)) => None,
        _ => Decision::whole(3),
    }
}

/// The gradient of `weight`, whose shape is read, from `x` and `grad`.
pub fn weight_backward(x: Operand, weight: Operand, grad: Operand, groups: usize) -> Option<Decision> {
    if is_strided(&[x, weight, grad]) {
        return None;
    }
    match (x.at, weight.at, grad.at) {
        (Shard(BATCH), ..) | (_, _, Shard(BATCH)) => Decision::new([Shard(BATCH), Replicate, Shard(BATCH)], Partial),
        (_, Shard(OUT), _) | (_, _, Shard(CHANNELS)) if groups == 1 => {
            Decision::new([Replicate, Shard(OUT), Shard(CHANNELS)], Shard(OUT))
        }
        (_, Shard(IN), _) | (Shard(CHANNELS), ..) if groups == 1 => {
            Decision::new([Shard(CHANNELS), Shard(IN), Replicate], Shard(IN))
        }
        (Shard(_), ..) | (_, _, Shard(_)) => None,
        _ => Decision::whole(3),
    }
}

/// The gradient of `bias`, from `grad`; the shapes of `x` and `bias` are read.
pub fn bias_backward(x: Operand, bias: Operand, grad: Operand) -> Option<Decision> {
    if is_strided(&[x, bias, grad]) {
        return None;
    }
    match (x.at, bias.at, grad.at) {
        (_, _, Shard(BATCH)) => Decision::new([Shard(BATCH), Replicate, Shard(BATCH)], Partial),
        (_, _, Shard(CHANNELS)) => Decision::new([Replicate, Shard(0), Shard(CHANNELS)], Shard(0)),
        (_, _, Shard(_)) => None,
        (_, _, Partial) => Decision::new([Replicate, Replicate, Partial], Partial),
        _ => Decision::whole(3),
    }
}

/// Pooling and other operations on each image and each channel alone.
pub fn per_channel(inputs: &[Operand]) -> Option<Decision> {
    let Some(at) = inputs.iter().map(|x| x.at).find(|at| at.is_shard()) else {
        return Decision::whole(inputs.len());
    };
    match at {
        Shard(BATCH | CHANNELS) => Decision::new(vec![at; inputs.len()], at),
        _ => None,
    }
}

/// [`per_channel`] of one input that is linear in it.
pub fn linear_per_channel(x: Operand) -> Option<Decision> {
    unary(x, true, |dim| (dim <= CHANNELS).then_some(dim))
}

/// `x [b, channels, ..]` normalized with `vectors` vectors of one number for each channel.
pub fn normalized_per_channel(x: Operand, vectors: usize) -> Option<Decision> {
    let (x, of_channels) = match x.at {
        Shard(CHANNELS) => (x.at, Shard(0)),
        Shard(_) => (x.at, Replicate),
        _ => return Decision::whole(1 + vectors),
    };
    let mut inputs = vec![of_channels; 1 + vectors];
    inputs[0] = x;
    Decision::new(inputs, x)
}
