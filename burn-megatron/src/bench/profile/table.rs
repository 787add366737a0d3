//! The tables of a profile.

use std::fmt::Write;

use super::{Ceilings, GpuProfile, Kernel, Line, ProfileReport, Totals};

/// Lines below this share of a step are summed up.
const SMALL: f64 = 0.0005;

/// The lines of the first GPU, then the totals of all.
pub fn text(report: &ProfileReport) -> String {
    let mut out = String::new();
    let ProfileReport { source, steps, milliseconds, ceilings, gpus, .. } = report;
    let _ = writeln!(out, "profile of {steps} steps, {milliseconds:.2} ms each, from {source}");
    let _ = writeln!(out, "ceilings: {}", described(ceilings));
    if let (Some(clock), Some(full), Some(half)) = (report.clock, ceilings.clock, ceilings.half) {
        let reach = half * clock / full / 1e12;
        let _ = writeln!(
            out,
            "at the {clock:.0} MHz of the last run bf16 could reach {reach:.0} TFLOP/s, not counted below"
        );
    }
    if let Some(first) = gpus.first() {
        let _ = writeln!(out, "\nGPU {}, per step", first.gpu);
        rows(&mut out, first);
    }
    totals(&mut out, report);
    out
}

fn described(ceilings: &Ceilings) -> String {
    let rates = [
        ("bf16", ceilings.half, 1e12, "TFLOP/s dense"),
        ("fp8", ceilings.fp8, 1e12, "TFLOP/s dense"),
        ("copy", ceilings.copy, 1e9, "GB/s read and written"),
        ("link", ceilings.link, 1e9, "GB/s sent"),
    ];
    let known =
        rates.iter().filter_map(|(name, rate, unit, words)| Some(format!("{name} {:.0} {words}", (*rate)? / unit)));
    let known: Vec<String> = known.chain([ceilings.source.clone()]).collect();
    known.join(", ")
}

fn rows(out: &mut String, gpu: &GpuProfile) {
    let _ = writeln!(
        out,
        "{:<58} {:>6} {:>8} {:>9} {:>7} {:>13} {:>8} {:>8}  kernel",
        "operation", "calls", "launches", "ms", "share", "achieved", "ceiling", "to gain"
    );
    let (shown, small): (Vec<&Line>, Vec<&Line>) = gpu.rows.iter().partition(|row| row.share >= SMALL);
    for row in shown {
        let rate = match (row.teraflops, row.gigabytes) {
            (Some(rate), _) => format!("{rate:.0} TFLOP/s"),
            (None, Some(rate)) => format!("{rate:.0} GB/s"),
            _ => "-".into(),
        };
        let share = row.of_ceiling.map_or("-".into(), |share| format!("{:.1} %", 100.0 * share));
        let gain = row.to_gain.map_or("-".into(), |gain| format!("{gain:.2}"));
        let _ = writeln!(
            out,
            "{:<58} {:>6.1} {:>8.1} {:>9.3} {:>5.1} % {rate:>13} {share:>8} {gain:>8}  {}",
            truncated(&row.name, 58),
            row.calls,
            row.launches,
            row.milliseconds,
            100.0 * row.share,
            kernels(row)
        );
    }
    if !small.is_empty() {
        let sum = |of: fn(&Line) -> f64| small.iter().map(|row| of(row)).sum::<f64>();
        let name = format!("{} others, each less than {:.2} %", small.len(), 100.0 * SMALL);
        let (calls, launches, time) = (sum(|row| row.calls), sum(|row| row.launches), sum(|row| row.milliseconds));
        let share = 100.0 * sum(|row| row.share);
        let _ = writeln!(out, "{name:<58} {calls:>6.1} {launches:>8.1} {time:>9.3} {share:>5.1} %");
    }
}

/// The longest kernel, and others that take at least a hundredth of the line's time.
fn kernels(row: &Line) -> String {
    let Some((first, others)) = row.kernels.split_first().filter(|(first, _)| first.name != row.name) else {
        return String::new();
    };
    let share = |kernel: &Kernel| 100.0 * kernel.milliseconds / row.milliseconds;
    let others = others.iter().filter(|kernel| share(kernel) >= 1.0);
    let others = others.map(|kernel| format!(" + {} {:.0} %", truncated(&kernel.name, 40), share(kernel)));
    std::iter::once(truncated(&first.name, 60)).chain(others).collect()
}

fn truncated(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.into();
    }
    text.chars().take(length - 1).chain(['…']).collect()
}

/// A line per total, a column per GPU.
fn totals(out: &mut String, report: &ProfileReport) {
    let (gpus, step) = (&report.gpus, report.milliseconds);
    let mut line = |name: &str, cell: &dyn Fn(&Totals) -> String| {
        let cells: String = gpus.iter().map(|gpu| format!(" {:>20}", cell(&gpu.totals))).collect();
        let _ = writeln!(out, "{name:<34}{cells}");
    };
    let time = |of: fn(&Totals) -> f64| {
        move |totals: &Totals| format!("{:.2} ms {:>5.1} %", of(totals), 100.0 * of(totals) / step)
    };
    let rate = |of: fn(&Totals) -> f64| move |totals: &Totals| format!("{:.0} TFLOP/s", of(totals));
    line("\ntotals per step", &|_| String::new());
    line("GEMMs", &time(|totals| totals.gemms.milliseconds));
    line("", &rate(|totals| totals.gemms.teraflops));
    line("  of these, overlapped with communication", &time(|totals| totals.gemms.overlapped));
    line("", &rate(|totals| totals.gemms.teraflops_overlapped));
    line("attention", &time(|totals| totals.attention.milliseconds));
    line("", &rate(|totals| totals.attention.teraflops));
    line("memory-bound kernels", &time(|totals| totals.memory));
    line("optimizer and norm", &time(|totals| totals.optimizer));
    if report.kernels {
        line("communication, hidden", &time(|totals| totals.collectives_hidden));
        line("communication, exposed", &time(|totals| totals.collectives_exposed));
        line("idle", &time(|totals| totals.idle));
    } else {
        line("waiting for communication", &time(|totals| totals.collectives_exposed));
        line("not recorded, or idle", &time(|totals| totals.idle));
    }
}

/// Every line of every GPU, for a spreadsheet.
pub fn csv(report: &ProfileReport) -> String {
    let mut out = String::from(
        "gpu,name,kind,calls,launches,milliseconds,share,teraflops,gigabytes_per_second,of_ceiling,to_gain_milliseconds,kernels\n",
    );
    let number = |value: Option<f64>| value.map_or(String::new(), |value| format!("{value:.4}"));
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    for (gpu, row) in report.gpus.iter().flat_map(|gpu| gpu.rows.iter().map(|row| (gpu.gpu, row))) {
        let _ = writeln!(
            out,
            "{gpu},{},{},{:.2},{:.2},{:.6},{:.6},{},{},{},{},{}",
            quoted(&row.name),
            row.kind,
            row.calls,
            row.launches,
            row.milliseconds,
            row.share,
            number(row.teraflops),
            number(row.gigabytes),
            number(row.of_ceiling),
            number(row.to_gain),
            quoted(&kernels(row))
        );
    }
    out
}
