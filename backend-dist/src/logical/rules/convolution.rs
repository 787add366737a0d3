//! Convolutions `x [b, in, ..] * weight [out, in, ..] -> [b, out, ..]`, transposed ones, whose weight is `[in, out, ..]`, their
//! gradients, and pooling.

use super::{Decision, Operand, is_strided, unary};
use crate::logical::Placement::{self, Partial, Replicate, Shard};

/// The dimensions of the operands.
const BATCH: usize = 0;
const CHANNELS: usize = 1;
const OUT: usize = 0;
const IN: usize = 1;

/// What a rule must know of a convolution besides its operands.
#[derive(Clone, Copy)]
pub struct Kind {
    /// Of channels, each with filters of its own.
    pub groups: usize,
    /// Whether the weight is `[in, out, ..]`.
    pub is_transposed: bool,
    /// Of the axis.
    pub ranks: usize,
}

impl Kind {
    /// The placements of a weight that is sharded by output and by input.
    fn shards(self) -> [Placement; 2] {
        if self.is_transposed { [Shard(IN), Shard(OUT)] } else { [Shard(OUT), Shard(IN)] }
    }

    /// Whether every rank can have groups of its own, with their channels and filters. The filters of a group lie together
    /// along the first dimension, plain or transposed.
    fn divides_groups(self) -> bool {
        self.groups > 1 && self.groups.is_multiple_of(self.ranks)
    }

    /// Where the groups are, along dimension 0, if channels or filters are sharded in parts and every rank has groups of its
    /// own of each of them.
    fn groups_in_parts(self, of_channels: &[Operand], of_filters: Operand) -> Option<Placement> {
        let channels = of_channels.iter().filter(|x| x.at.dim() == Some(CHANNELS));
        let of_filters = Some(&of_filters).filter(|x| x.at.dim() == Some(0));
        let at = channels.chain(of_filters).map(|x| x.at.along(0)).find(|at| at.is_in_parts())?;
        (self.groups > 1 && at.local_shape(&[self.groups], self.ranks).is_some()).then_some(at)
    }
}

/// Forward. With `groups` the batch is sharded, or whole groups are.
pub fn forward(x: Operand, weight: Operand, bias: Option<Operand>, kind: Kind) -> Option<Decision> {
    let decision = |x, weight, bias_at, out| {
        let mut inputs = vec![x, weight];
        inputs.extend(bias.map(|_| bias_at));
        Decision::new(inputs, out)
    };
    if let Some(at) = kind.groups_in_parts(&[x], weight) {
        return decision(at.along(CHANNELS), at, at, at.along(CHANNELS));
    }
    if is_strided(&[x, weight]) {
        return None;
    }
    let ([by_out, by_input], groups) = (kind.shards(), kind.groups);
    match (x.at, weight.at) {
        (Shard(BATCH), _) => decision(Shard(BATCH), Replicate, Replicate, Shard(BATCH)),
        (Shard(CHANNELS), _) | (_, Shard(0)) if kind.divides_groups() => {
            decision(Shard(CHANNELS), Shard(0), Shard(0), Shard(CHANNELS))
        }
        (_, at) if at == by_out && groups == 1 => decision(Replicate, by_out, Shard(0), Shard(CHANNELS)),
        (Shard(_), _) | (_, Shard(_)) if bias.is_some_and(|bias| bias.at.is_shard()) => None,
        // One rank adds the bias.
        (Shard(CHANNELS), _) if groups == 1 => decision(Shard(CHANNELS), by_input, Partial, Partial),
        (_, at) if at == by_input && groups == 1 => decision(Shard(CHANNELS), by_input, Partial, Partial),
        (Shard(_), _) | (_, Shard(_)) => None,
        _ if bias.is_some_and(|bias| bias.at.is_shard()) => None,
        _ => Decision::whole(2 + usize::from(bias.is_some())),
    }
}

/// The gradient of `x`, whose shape is read, from `weight` and `grad`.
pub fn x_backward(x: Operand, weight: Operand, grad: Operand, kind: Kind) -> Option<Decision> {
    if let Some(at) = kind.groups_in_parts(&[x, grad], weight) {
        return Decision::new([at.along(CHANNELS), at, at.along(CHANNELS)], at.along(CHANNELS));
    }
    if is_strided(&[x, weight, grad]) {
        return None;
    }
    let groups = kind.groups;
    match (x.at, weight.at, grad.at) {
        (_, _, Shard(BATCH)) | (Shard(BATCH), ..) => {
            Decision::new([Shard(BATCH), Replicate, Shard(BATCH)], Shard(BATCH))
        }
        (Shard(CHANNELS), ..) | (_, Shard(0), _) | (_, _, Shard(CHANNELS)) if kind.divides_groups() => {
            Decision::new([Shard(CHANNELS), Shard(0), Shard(CHANNELS)], Shard(CHANNELS))
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
pub fn weight_backward(x: Operand, weight: Operand, grad: Operand, kind: Kind) -> Option<Decision> {
    if let Some(at) = kind.groups_in_parts(&[x, grad], weight) {
        return Decision::new([at.along(CHANNELS), at, at.along(CHANNELS)], at);
    }
    if is_strided(&[x, weight, grad]) {
        return None;
    }
    let ([by_out, by_input], groups) = (kind.shards(), kind.groups);
    match (x.at, weight.at, grad.at) {
        (Shard(BATCH), ..) | (_, _, Shard(BATCH)) => Decision::new([Shard(BATCH), Replicate, Shard(BATCH)], Partial),
        (Shard(CHANNELS), ..) | (_, Shard(0), _) | (_, _, Shard(CHANNELS)) if kind.divides_groups() => {
            Decision::new([Shard(CHANNELS), Shard(0), Shard(CHANNELS)], Shard(0))
        }
        (_, at, grad) if groups == 1 && (at == by_out || grad == Shard(CHANNELS)) => {
            Decision::new([Replicate, by_out, Shard(CHANNELS)], by_out)
        }
        (x, at, _) if groups == 1 && (at == by_input || x == Shard(CHANNELS)) => {
            Decision::new([Shard(CHANNELS), by_input, Replicate], by_input)
        }
        (Shard(_), ..) | (_, _, Shard(_)) => None,
        _ => Decision::whole(3),
    }
}

/// The gradient of `bias`, from `grad`; the shapes of `x` and `bias` are read.
pub fn bias_backward(x: Operand, bias: Operand, grad: Operand) -> Option<Decision> {
    if grad.at.dim() == Some(CHANNELS) {
        // Of `x` only batch and length are read.
        let x = if x.at.dim() == Some(CHANNELS) { x.at } else { Replicate };
        return Decision::new([x, grad.at.along(0), grad.at], grad.at.along(0));
    }
    if is_strided(&[x, bias, grad]) {
        return None;
    }
    match (x.at, bias.at, grad.at) {
        (_, _, Shard(BATCH)) => Decision::new([Shard(BATCH), Replicate, Shard(BATCH)], Partial),
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
