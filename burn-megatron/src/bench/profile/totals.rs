//! Totals of a GPU: kinds of work, and what of the collectives is hidden behind it.

use std::collections::HashMap;

use backend_dist::gpu::profile::intervals::{Interval, shared, total, union};
use backend_dist::gpu::profile::{Kind, Profile, Span};
use serde::{Deserialize, Serialize};

use super::{milliseconds, span_kind};

/// Arithmetic of one kind, in total and while communication takes SMs and memory bandwidth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Arithmetic {
    /// Milliseconds per step.
    pub milliseconds: f64,
    /// 10¹² FLOP/s.
    pub teraflops: f64,
    /// Milliseconds of operations that overlapped with communication for most of their time.
    pub overlapped: f64,
    /// Their 10¹² FLOP/s.
    pub teraflops_overlapped: f64,
}

/// Sums of one GPU, in milliseconds per step. Kinds add up to what kernels took one by one; busy time, exposed
/// collectives and idle time add up to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Totals {
    /// GEMMs.
    pub gemms: Arithmetic,
    /// Attention, forward and backward.
    pub attention: Arithmetic,
    /// Kernels that memory limits.
    pub memory: f64,
    /// Optimizer and norm.
    pub optimizer: f64,
    /// Time in which a kernel other than communication ran.
    pub busy: f64,
    /// Time in which communication overlapped with another kernel.
    pub collectives_hidden: f64,
    /// Time in which only communication ran.
    pub collectives_exposed: f64,
    /// Time in which nothing ran.
    pub idle: f64,
}

/// Times in which some kernel of the GPU other than a collective ran.
pub(super) fn busy(profile: &Profile, gpu: usize) -> Vec<Interval> {
    times(profile, gpu, false)
}

fn times(profile: &Profile, gpu: usize, collectives: bool) -> Vec<Interval> {
    let is_wanted = |span: &&Span| (span_kind(profile, span) == Kind::Collective) == collectives;
    let some = profile.spans.iter().filter(|span| span.gpu == gpu).filter(is_wanted);
    union(some.map(|span| (span.start, span.end)))
}

/// Of one GPU.
pub(super) fn totals(profile: &Profile, gpu: usize, steps: usize) -> Totals {
    let on_this = profile.spans.iter().filter(|span| span.gpu == gpu);
    let spans: Vec<(Kind, &Span)> = on_this.map(|span| (span_kind(profile, span), span)).collect();
    let (busy, collectives) = (times(profile, gpu, false), times(profile, gpu, true));
    let hidden: u64 = collectives.iter().map(|collective| shared(*collective, &busy)).sum();
    let exposed = total(&collectives) - hidden;
    let sum = |wanted: Kind| -> u64 {
        spans.iter().filter(|(kind, _)| *kind == wanted).map(|(_, span)| span.end - span.start).sum()
    };
    let of = |nanoseconds| milliseconds(nanoseconds, steps);
    Totals {
        gemms: arithmetic(profile, &spans, Kind::Gemm, &collectives, steps),
        attention: arithmetic(profile, &spans, Kind::Attention, &collectives, steps),
        memory: of(sum(Kind::Memory)),
        optimizer: of(sum(Kind::Optimizer)),
        busy: of(total(&busy)),
        collectives_hidden: of(hidden),
        collectives_exposed: of(exposed),
        idle: of(profile.window.saturating_sub(total(&busy) + exposed)),
    }
}

fn arithmetic(
    profile: &Profile,
    spans: &[(Kind, &Span)],
    wanted: Kind,
    collectives: &[Interval],
    steps: usize,
) -> Arithmetic {
    // By operation, so that its arithmetic is counted once whatever it launches; what is not noted has none.
    let mut by_operation: HashMap<Option<usize>, (u64, u64)> = HashMap::new();
    for (_, span) in spans.iter().filter(|(kind, _)| *kind == wanted) {
        let (time, overlapped) = by_operation.entry(span.operation).or_default();
        *time += span.end - span.start;
        *overlapped += shared((span.start, span.end), collectives);
    }
    let rate = |overlapped_only: bool| {
        let some = by_operation.iter().filter(|(_, (time, overlapped))| !overlapped_only || 2 * overlapped > *time);
        let (mut time, mut flops) = (0, 0.0);
        for (operation, (nanoseconds, _)) in some {
            time += nanoseconds;
            flops += operation.map_or(0.0, |index| profile.operations[index].operation.flops);
        }
        (milliseconds(time, steps), if time > 0 { flops / time as f64 / 1e3 } else { 0.0 })
    };
    let ((milliseconds, teraflops), (overlapped, teraflops_overlapped)) = (rate(false), rate(true));
    Arithmetic { milliseconds, teraflops, overlapped, teraflops_overlapped }
}
