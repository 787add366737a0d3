//! The tables of a measurement.

use std::fmt::Write;

use super::{Distribution, DocumentReport, Record, Setup};
use crate::plan::bytes;

fn percent(share: Option<f64>) -> String {
    share.map_or("not known".into(), |share| format!("{:.1} %", 100.0 * share))
}

fn size(size: Option<u64>) -> String {
    size.map_or("not known".into(), bytes)
}

/// `1234`, `56.7`, `0.00123`: about four significant digits.
fn number(value: f64) -> String {
    match value.abs() {
        magnitude if magnitude >= 1000.0 => format!("{value:.0}"),
        magnitude if magnitude >= 10.0 => format!("{value:.1}"),
        magnitude if magnitude >= 0.01 => format!("{value:.3}"),
        _ => format!("{value:.6}"),
    }
}

fn spread(distribution: &Distribution) -> String {
    let Distribution { p10, p50, p90, .. } = distribution;
    format!("p50 {}, p10 {}, p90 {}", number(*p50), number(*p10), number(*p90))
}

/// The table that is printed.
pub fn text(record: &Record) -> String {
    let Record { origin, setup, device, timing, .. } = record;
    let mut out = String::new();
    let each = if device.peak.is_some() || record.idle.is_some() { "GPU" } else { "rank" };
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<22}{value}");
    };
    line("recipe", format!("{}: {}, {} parameters, {}", setup.recipe, setup.model, setup.parameters, setup.dtype));
    line("layout", format!("{} on {} x {}", setup.layout, setup.ranks, device.name));
    line(
        "step",
        format!(
            "{} tokens per {each}: {} sequences of {} tokens ({}), {} per micro-batch",
            setup.tokens_per_rank, setup.global_batch, setup.seq_length, setup.data, setup.micro_batch
        ),
    );
    for (name, value) in record.documents.iter().flat_map(document_lines) {
        line(name, value);
    }
    line(&format!("tokens/s/{each}"), {
        let runs: Vec<String> = record.runs.iter().map(|run| number(run.tokens_per_second_per_rank)).collect();
        format!("{}  (median of runs: {})", number(record.tokens_per_second_per_rank), runs.join(", "))
    });
    line("  by step", spread(&record.steps_tokens_per_second_per_rank));
    line("step seconds", {
        let Distribution { min, max, .. } = record.step_seconds;
        format!("{}, from {} to {}", spread(&record.step_seconds), number(min), number(max))
    });
    line(
        &format!("TFLOP/s/{each}"),
        format!(
            "{} with causal attention, {} with full attention",
            number(record.teraflops_per_rank),
            number(record.teraflops_per_rank_full_attention)
        ),
    );
    if let (Some(peak), Some(source)) = (device.peak, &device.source) {
        let (once, full) = (percent(record.mfu), percent(record.mfu_full_attention));
        line(
            "MFU",
            format!(
                "{once} with causal attention, {full} with full attention, of {:.1} TFLOP/s dense ({source})",
                peak / 1e12
            ),
        );
    }
    if record.idle.is_some() {
        line("GPU idle", percent(record.idle));
    }
    if let (Some(clock), Some(power)) = (record.clock, record.power) {
        line("clock, power", format!("{clock:.0} MHz, {power:.0} W (means over the GPUs of the last run)"));
    }
    line("memory, peak rank", {
        let reserved =
            record.memory.reserved.map_or(String::new(), |size| format!(", {} reserved by the allocator", bytes(size)));
        format!("{}{reserved}; planned {}", size(record.memory.used), size(record.memory.planned))
    });
    if let Some(fullest) = record.memory_use.iter().max_by_key(|memory| memory.used) {
        line("  after the last run", fullest.to_string());
    }
    line("loss", format!("{:.4} in the first step, {:.4} in the last", record.first_loss, record.last_loss));
    line("start of rank 0", format!("{}; {:.1} s since the launch of the ranks", record.startup, record.first_step));
    let runs = if timing.runs == 1 { "1 run".to_string() } else { format!("{} runs", timing.runs) };
    line("measured", format!("{runs} of {} steps after {} warm-up steps", timing.steps, timing.warmup));
    for (name, version) in &device.versions {
        line(name, version.clone());
    }
    line("processor", origin.processor.clone());
    line("commit, date", format!("{}, {} UTC", origin.commit, origin.date));
    line("command", origin.command.clone());
    out
}

/// The documents, and the simulated steps of each assignment to ranks.
fn document_lines(documents: &DocumentReport) -> [(&'static str, String); 2] {
    let DocumentReport { per_step, mean, median, longest, simulated, .. } = documents;
    let lengths = format!(
        "{} per step: mean {} tokens, median {median}, longest {longest}; padding {}",
        number(*per_step),
        number(*mean),
        percent(Some(documents.padding))
    );
    let times: Vec<String> = simulated.iter().map(|(layout, time)| format!("{layout} {time:.3}")).collect();
    let simulated = format!("{} (1: ranks equally loaded, no communication)", times.join(", "));
    [("documents", lengths), ("  simulated step", simulated)]
}

/// The run that would be measured; `planned` are the bytes of the fullest rank by plan.
pub fn announcement(setup: &Setup, planned: Option<u64>, documents: Option<&DocumentReport>) -> String {
    let layout = format!("{} on {} ranks, {} per micro-batch", setup.layout, setup.ranks, setup.micro_batch);
    let step = format!("{} sequences of {} tokens ({})", setup.global_batch, setup.seq_length, setup.data);
    let first = [("layout", layout), ("step", step), ("memory by plan", size(planned))];
    let documents = documents.into_iter().flat_map(document_lines);
    first.into_iter().chain(documents).fold(String::new(), |text, (name, value)| text + &format!("{name:<22}{value}\n"))
}

/// The table of results, of one line.
pub fn markdown(record: &Record) -> String {
    let Record { origin, setup, device, .. } = record;
    let columns = [
        ("date", origin.day().to_string()),
        ("commit", origin.commit.clone()),
        ("machine", format!("{} x {}", setup.ranks, device.name)),
        ("recipe", setup.recipe.clone()),
        ("layout", setup.layout.clone()),
        ("tokens/GPU/step", setup.tokens_per_rank.to_string()),
        ("tokens/s/GPU", number(record.tokens_per_second_per_rank)),
        ("step p50 (p10-p90), s", {
            let Distribution { p10, p50, p90, .. } = record.step_seconds;
            format!("{} ({}-{})", number(p50), number(p10), number(p90))
        }),
        ("TFLOP/s causal / full", {
            let (once, full) = (record.teraflops_per_rank, record.teraflops_per_rank_full_attention);
            format!("{} / {}", number(once), number(full))
        }),
        ("MFU causal / full", format!("{} / {}", percent(record.mfu), percent(record.mfu_full_attention))),
        ("GPU idle", percent(record.idle)),
        ("memory (planned)", format!("{} ({})", size(record.memory.used), size(record.memory.planned))),
        ("loss", format!("{:.3} to {:.3}", record.first_loss, record.last_loss)),
        ("command", format!("`{}`", origin.command)),
    ];
    let row = |cells: Vec<&str>| format!("| {} |\n", cells.join(" | "));
    let heading = row(columns.iter().map(|(name, _)| *name).collect());
    let cells = row(columns.iter().map(|(_, cell)| cell.as_str()).collect());
    heading + &row(vec!["---"; columns.len()]) + &cells
}

/// A line per record, compared with the first.
pub fn together(records: &[Record]) -> String {
    let first = records.first().map_or(1.0, |record| record.tokens_per_second_per_rank);
    let columns = |record: &Record| {
        let Distribution { p10, p50, p90, .. } = record.step_seconds;
        [
            record.setup.layout.clone(),
            record.setup.ranks.to_string(),
            record.setup.tokens_per_rank.to_string(),
            number(record.tokens_per_second_per_rank),
            format!("{:.3}", record.tokens_per_second_per_rank / first),
            format!("{} ({}-{})", number(p50), number(p10), number(p90)),
            number(record.teraflops_per_rank),
            percent(record.mfu),
            percent(record.idle),
            size(record.memory.used),
            format!("{:.4}", record.last_loss),
        ]
    };
    let names = [
        "layout",
        "ranks",
        "tokens/rank",
        "tokens/s/rank",
        "vs. first",
        "step s",
        "TFLOP/s",
        "MFU",
        "idle",
        "memory",
        "loss",
    ];
    let lines: Vec<[String; 11]> =
        std::iter::once(names.map(String::from)).chain(records.iter().map(columns)).collect();
    let widths: [usize; 11] =
        std::array::from_fn(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or_default());
    let line = |cells: &[String; 11]| {
        let padded = cells.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_string()
    };
    lines.iter().map(line).collect::<Vec<_>>().join("\n")
}
