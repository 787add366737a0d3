//! Lines of the table.

use std::collections::HashMap;

use backend_dist::gpu::profile::intervals::shared;
use backend_dist::gpu::profile::{Kind, Noted, Precision, Profile, Span, readable};
use serde::{Deserialize, Serialize};

use super::totals::busy;
use super::{Ceilings, milliseconds, span_kind};

/// All that ran under one name on one GPU, per step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The operation, or the kernel that no operation has launched.
    pub name: String,
    /// `gemm`, `attention`, `memory`, `optimizer` or `communication`.
    pub kind: String,
    /// Operations; of kernels that none has launched, launches.
    pub calls: f64,
    /// Kernels, copies and fills.
    pub launches: f64,
    /// Milliseconds in all of them together.
    pub milliseconds: f64,
    /// Of the step's time.
    pub share: f64,
    /// Arithmetic, in 10¹² FLOP/s.
    pub teraflops: Option<f64>,
    /// Bytes that cannot be avoided, in GB/s; of collectives, those sent.
    pub gigabytes: Option<f64>,
    /// Of the ceiling that limits it.
    pub of_ceiling: Option<f64>,
    /// Milliseconds above the time that the ceiling allows; of collectives, those in which no other kernel ran.
    pub to_gain: Option<f64>,
    /// What was launched, the longest first.
    pub kernels: Vec<Kernel>,
}

/// A kernel's part of a line, per step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Kernel {
    /// Without parameters and template arguments.
    pub name: String,
    /// How often.
    pub launches: f64,
    /// Milliseconds in all launches together.
    pub milliseconds: f64,
}

/// A line's sums over all steps.
struct Sum<'a> {
    kind: Kind,
    precision: Precision,
    calls: usize,
    nanoseconds: u64,
    flops: f64,
    bytes: f64,
    launches: usize,
    /// Nanoseconds in which no other kernel ran, if this is a collective.
    exposed: u64,
    /// Launches and nanoseconds.
    kernels: HashMap<&'a str, (usize, u64)>,
}

impl Sum<'_> {
    fn new(kind: Kind, precision: Precision) -> Self {
        let kernels = HashMap::new();
        Self { kind, precision, calls: 0, nanoseconds: 0, flops: 0.0, bytes: 0.0, launches: 0, exposed: 0, kernels }
    }
}

/// The lines of one GPU, the longest first.
pub(super) fn rows(profile: &Profile, gpu: usize, steps: usize, ceilings: &Ceilings) -> Vec<Line> {
    let mut sums: HashMap<String, Sum> = HashMap::new();
    for Noted { operation, .. } in profile.operations.iter().filter(|noted| noted.gpu == gpu) {
        let new = || Sum::new(operation.kind, operation.precision);
        let sum = sums.entry(operation.name.to_string()).or_insert_with(new);
        sum.calls += 1;
        sum.flops += operation.flops;
        sum.bytes += operation.bytes;
    }
    let busy = busy(profile, gpu);
    for span in profile.spans.iter().filter(|span| span.gpu == gpu) {
        let operation = span.operation.map(|index| &profile.operations[index].operation);
        let name = operation.map_or_else(|| readable(&span.name), |operation| operation.name.to_string());
        let sum = sums.entry(name).or_insert_with(|| Sum::new(span_kind(profile, span), Precision::Single));
        if operation.is_none() {
            sum.calls += 1;
            sum.bytes += moved(span) as f64;
        }
        sum.launches += 1;
        let nanoseconds = span.end - span.start;
        sum.nanoseconds += nanoseconds;
        if sum.kind == Kind::Collective {
            sum.exposed += nanoseconds - shared((span.start, span.end), &busy);
        }
        let (launches, time) = sum.kernels.entry(&span.name).or_default();
        (*launches, *time) = (*launches + 1, *time + nanoseconds);
    }
    let mut rows: Vec<Line> = sums
        .into_iter()
        .filter(|(_, sum)| sum.nanoseconds > 0)
        .map(|(name, sum)| row(name, &sum, profile.window, steps, ceilings))
        .collect();
    rows.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds).then_with(|| a.name.cmp(&b.name)));
    rows
}

/// Bytes that a copy on the GPU or a fill reads and writes; of copies over the bus nothing is known.
fn moved(span: &Span) -> u64 {
    match span.name.as_str() {
        "copy on the GPU" => 2 * span.bytes,
        "fill" => span.bytes,
        _ => 0,
    }
}

fn row(name: String, sum: &Sum, window: u64, steps: usize, ceilings: &Ceilings) -> Line {
    let seconds = sum.nanoseconds as f64 / 1e9;
    let (rate, ceiling) = match sum.flops > 0.0 {
        true => (sum.flops / seconds, ceilings.arithmetic(sum.precision)),
        false => (sum.bytes / seconds, ceilings.bytes(sum.kind)),
    };
    let of_ceiling = ceiling.filter(|_| rate > 0.0).map(|ceiling| rate / ceiling);
    let per_step = |count: usize| count as f64 / steps.max(1) as f64;
    let time = milliseconds(sum.nanoseconds, steps);
    let kernel = |(symbol, (launches, time)): (&&str, &(usize, u64))| Kernel {
        name: readable(symbol),
        launches: per_step(*launches),
        milliseconds: milliseconds(*time, steps),
    };
    let mut kernels: Vec<Kernel> = sum.kernels.iter().map(kernel).collect();
    kernels.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds).then_with(|| a.name.cmp(&b.name)));
    Line {
        kind: word(sum.kind).into(),
        calls: per_step(sum.calls),
        launches: per_step(sum.launches),
        share: sum.nanoseconds as f64 / window.max(1) as f64,
        teraflops: (sum.flops > 0.0).then_some(sum.flops / seconds / 1e12),
        gigabytes: (sum.bytes > 0.0).then_some(sum.bytes / seconds / 1e9),
        of_ceiling,
        to_gain: match sum.kind {
            Kind::Collective => Some(milliseconds(sum.exposed, steps)),
            _ => of_ceiling.map(|share| time * (1.0 - share).max(0.0)),
        },
        kernels,
        milliseconds: time,
        name,
    }
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Gemm => "gemm",
        Kind::Attention => "attention",
        Kind::Memory => "memory",
        Kind::Optimizer => "optimizer",
        Kind::Collective => "communication",
    }
}
