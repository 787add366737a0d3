//! What a stage computes at a time. Pure.
//!
//! A stage's forward pass is a chain of segments, each with an autodiff graph of its own. Its backward pass goes
//! through them from the last to the first: gradients of weights exist for one segment only before they are added to
//! the main gradients, and a segment that is recomputed keeps nothing but its input.

use backend_dist::shard::Unit;
use models::Part;
use models::recompute::{Granularity, Method, Recompute};
use std::ops::Range;

/// A contiguous part of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// From tokens to activations.
    Embedding,
    /// Layers, counted over the whole model.
    Layers(Range<usize>),
    /// From activations to losses.
    Head,
}

/// A contiguous part of a model with an autodiff graph of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which part.
    pub link: Link,
    /// Only the input is saved; the backward pass recomputes it.
    pub recompute: bool,
    /// Attention outputs are saved too and not recomputed.
    pub keep_attention: bool,
}

impl Link {
    /// Whether the part uses parameters of `unit`, in a model of `layers` layers. Layers beyond these, which predict
    /// further tokens, belong to the head.
    pub fn uses(&self, unit: Unit, layers: usize) -> bool {
        match (self, unit) {
            (link, Unit::Layer(layer) | Unit::Experts(layer)) if layer >= layers => *link == Link::Head,
            (Link::Embedding, Unit::Tied | Unit::Embedding) | (Link::Head, Unit::Tied | Unit::Head) => true,
            (Link::Layers(layers), Unit::Layer(layer) | Unit::Experts(layer)) => layers.contains(&layer),
            _ => false,
        }
    }
}

/// The segments of a stage in the order of the forward pass. With `again`, all are recomputed: the graph of a
/// segment holds its weights, which ZeRO 3 must be able to free between the passes.
pub fn segments(part: &Part, recompute: &Recompute, again: bool) -> Vec<Segment> {
    let full = recompute.granularity == Granularity::Full;
    let step = if full && recompute.method == Method::Uniform { recompute.num_layers.max(1) } else { 1 };
    let (first, keep_attention) = (part.layers.start, full && recompute.keep_attention);
    let layers = part.layers.clone().step_by(step).map(|start| {
        let dropped = full && (recompute.method == Method::Uniform || start - first < recompute.num_layers);
        let recompute = dropped || again;
        Segment { link: Link::Layers(start..(start + step).min(part.layers.end)), recompute, keep_attention }
    });
    // The head has attention only in modules of multi-token prediction, which a pass without a graph does not run.
    let end = |there: bool, link| there.then_some(Segment { link, recompute: again, keep_attention: false });
    end(part.embedding, Link::Embedding).into_iter().chain(layers).chain(end(part.head, Link::Head)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(part: &Part, recompute: &Recompute, again: bool) -> String {
        let one = |segment: &Segment| {
            let mark = if segment.recompute { "*" } else { "" };
            match &segment.link {
                Link::Embedding => format!("E{mark}"),
                Link::Layers(layers) => format!("{}-{}{mark}", layers.start, layers.end),
                Link::Head => format!("H{mark}"),
            }
        };
        segments(part, recompute, again).iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn full_recomputation_groups_layers_or_takes_the_first() {
        let part = Part { layers: 4..9, embedding: false, head: true };
        let full = |method, num_layers| Recompute {
            granularity: Granularity::Full,
            method,
            num_layers,
            ..Recompute::default()
        };
        assert_eq!(text(&part, &Recompute::default(), false), "4-5 5-6 6-7 7-8 8-9 H");
        assert_eq!(text(&part, &full(Method::Uniform, 2), false), "4-6* 6-8* 8-9* H");
        assert_eq!(text(&part, &full(Method::Block, 2), false), "4-5* 5-6* 6-7 7-8 8-9 H");
        assert_eq!(text(&Part::whole(2), &Recompute::default(), true), "E* 0-1* 1-2* H*");
    }

    /// Under ZeRO 3 the head is recomputed too. Its forward pass has saved no attention, for it ran none.
    #[test]
    fn only_layers_keep_their_attention() {
        let recompute = Recompute { granularity: Granularity::Full, keep_attention: true, ..Recompute::default() };
        let keeps: Vec<bool> =
            segments(&Part::whole(2), &recompute, true).iter().map(|segment| segment.keep_attention).collect();
        assert_eq!(keeps, [false, true, true, false]);
    }

    #[test]
    fn every_unit_is_used_somewhere() {
        let segments = segments(&Part::whole(3), &Recompute::default(), false);
        let users = |unit| segments.iter().filter(|segment| segment.link.uses(unit, 3)).count();
        let units = [Unit::Tied, Unit::Embedding, Unit::Layer(0), Unit::Layer(2), Unit::Head, Unit::Layer(3)];
        assert_eq!(units.map(users), [2, 1, 1, 1, 1, 1]);
        assert_eq!([Unit::Experts(2), Unit::Experts(3)].map(users), [1, 1]);
        assert!(Link::Head.uses(Unit::Layer(3), 3) && !Link::Head.uses(Unit::Layer(2), 3));
        assert!(!Link::Layers(0..3).uses(Unit::Layer(3), 4));
    }
}
