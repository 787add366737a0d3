//! The report of a plan.

use std::fmt::{self, Write};

use layouts::recompute::{Granularity, Recompute};

use super::gpus::Hardware;
use super::memory::RankMemory;
use super::search::{Candidate, SearchResult};
use super::time::{DrawTime, StepTime};
use super::{Job, Plan, StateBytes, ladder};
use host::schedule::stages::StageLayout;

/// A plan, its hardware, and other layouts.
pub struct Report<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The GPUs of the plan.
    pub hardware: &'a Hardware,
    /// The GPUs' name.
    pub name: &'a str,
    /// Show every pipeline rank, not only the fullest.
    pub all_ranks: bool,
    /// GPUs of the other layouts.
    pub gpus: usize,
    /// Other layouts in the precision of the run.
    pub found: &'a SearchResult,
    /// Other layouts with FP8 if the run is without, and without if it is with.
    pub other: Option<&'a SearchResult>,
}

/// Bytes in the largest unit that gives at least 1: `61.3 GiB`.
pub fn bytes(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(power, _)| bytes >> power > 0) {
        Some((power, unit)) => format!("{:.1} {unit}", bytes as f64 / (1u64 << power) as f64),
        None => format!("{bytes} B"),
    }
}

/// Seconds with three digits.
fn seconds(seconds: f64) -> String {
    match seconds {
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 1e-3 => format!("{:.1} ms", s * 1e3),
        s => format!("{:.1} us", s * 1e6),
    }
}

/// A number with commas between thousands: `11006` as `11,006`.
pub fn thousands(number: f64) -> String {
    let digits = format!("{number:.0}");
    let parts: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|part| std::str::from_utf8(part).unwrap_or_default()).collect();
    parts.join(",")
}

fn percent(part: f64, whole: f64) -> f64 {
    100.0 * part / whole.max(f64::MIN_POSITIVE)
}

impl RankMemory {
    /// The parts by name, in the order of the report.
    pub fn kinds(&self) -> [(&'static str, u64); 13] {
        [
            ("weights", self.states.weights),
            ("FP8 weights", self.states.quantised),
            ("gradients", self.states.gradients),
            ("master weights", self.states.master),
            ("optimizer states", self.states.moments),
            ("activations", self.activations),
            ("logits and loss", self.loss),
            ("workspace", self.working),
            ("communication buffers", self.communication),
            ("teacher or reference model", self.frozen),
            ("keys and values of completions", self.cache),
            ("fragmentation", self.pages),
            ("driver and libraries", self.libraries),
        ]
    }
}

impl StepTime {
    /// The parts of a step's time by name.
    pub fn parts(&self) -> [(&'static str, f64); 9] {
        [
            ("arithmetic", self.compute),
            ("recomputation", self.recompute),
            ("memory bandwidth", self.memory),
            ("TP and CP communication, exposed", self.tensor),
            ("EP communication, exposed", self.experts),
            ("pipeline bubble", self.bubble),
            ("DP communication, exposed", self.data),
            ("optimizer", self.optimizer),
            ("rest", 0.0),
        ]
    }

    /// The largest part besides arithmetic.
    pub fn limit(&self) -> String {
        let parts = self.parts();
        let largest = parts[1..].iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("there are parts");
        format!("{} {:.0} %", largest.0, percent(largest.1, self.step))
    }
}

fn recompute_name(recompute: &Recompute) -> String {
    match recompute.granularity {
        Granularity::None => "none".into(),
        Granularity::Full => {
            let attention = if recompute.keep_attention { " except attention" } else { "" };
            format!("full{attention}{}", if recompute.cpu_offload { ", inputs on the host" } else { "" })
        }
        Granularity::Selective => "selective".into(),
    }
}

/// A layout in one line: sizes, schedule, micro-batch, recomputation.
pub fn describe(job: &Job) -> String {
    let mut text = job.layout.to_string();
    if job.layout.pp > 1 {
        _ = write!(text, " {}", job.schedule_name());
    }
    _ = write!(text, ", micro-batch {}", job.micro_batch);
    if !job.fp8.is_empty() {
        text += if job.decoder.experts.is_some() && !job.fp8_experts { ", fp8 except experts" } else { ", fp8" };
    }
    if job.recompute.granularity != Granularity::None {
        _ = write!(text, ", recompute {}", recompute_name(&job.recompute));
    }
    if let Some(most) = job.dynamic {
        _ = write!(text, ", dynamic:{most}");
    }
    text
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { job, time, .. } = self.plan;
        let ranks = job.layout.world_size();
        writeln!(f, "layout       {} on {ranks} x {}", describe(job), self.name)?;
        self.memory(f)?;
        if job.gpu && job.decoder.softcap {
            let what =
                "no GPU kernel has the soft cap of the scores: all scores of a layer are in memory, which this plan";
            writeln!(f, "attention    {what} does not count")?;
        }
        let bubble = percent(time.idle_share, 1.0);
        let micro_batches = job.schedule.micro_batches;
        writeln!(f, "bubble       {bubble:.1} % ({}, micro-batches: {micro_batches})", job.schedule_name())?;
        self.traffic(f)?;
        let each = thousands(time.tokens_per_second / ranks as f64);
        writeln!(
            f,
            "step         {}, {} tokens/s, {each} per GPU, MFU {:.1} %",
            seconds(time.step),
            thousands(time.tokens_per_second),
            100.0 * time.mfu
        )?;
        let parts = time.parts().into_iter().filter(|(_, part)| percent(*part, time.step) >= 0.5);
        let parts: Vec<String> =
            parts.map(|(name, part)| format!("{name} {:.0} %", percent(part, time.step))).collect();
        writeln!(f, "             {}", parts.join(", "))?;
        self.draws(f)?;
        self.others(f)
    }
}

impl Report<'_> {
    fn memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { memory, .. } = self.plan;
        let fullest = self.plan.fullest();
        let (peak, most) = (memory[fullest].peak(), self.hardware.memory);
        let verdict = if peak <= most { "fits" } else { "DOES NOT FIT" };
        let where_ = if memory.len() > 1 { format!(" on pipeline rank {fullest}, the fullest") } else { String::new() };
        writeln!(f, "memory       {verdict}: {} of {}{where_}", bytes(peak), bytes(most))?;
        let shown: Vec<usize> = if self.all_ranks { (0..memory.len()).collect() } else { vec![fullest] };
        for rank in shown {
            let kinds = memory[rank].kinds().into_iter().filter(|(_, size)| *size > 0);
            let kinds: Vec<String> = kinds.map(|(name, size)| format!("{name} {}", bytes(size))).collect();
            match self.all_ranks {
                true => writeln!(f, "  rank {rank:<6} {}: {}", bytes(memory[rank].peak()), kinds.join(", "))?,
                false => writeln!(f, "             {}", kinds.join(", "))?,
            }
        }
        let on_host = |of: &dyn Fn(&RankMemory) -> u64| memory.iter().map(of).max().unwrap_or(0);
        let states = (on_host(&|rank| rank.states.host), "optimizer states");
        let activations = (on_host(&|rank| rank.host), "inputs of recomputed layers");
        for (each, what) in [states, activations].into_iter().filter(|(each, _)| *each > 0) {
            let ranks = self.plan.job.layout.world_size().min(self.hardware.host) as u64;
            let all = bytes(each * ranks);
            writeln!(f, "host memory  {} of page-locked {what} per rank, {all} for {ranks} of a host", bytes(each))?;
        }
        if peak > most
            && let Some((small, keys)) = ladder::with_small_states(&self.plan.job, most)
        {
            let needs = bytes(ladder::peak(&small).unwrap_or_default());
            writeln!(f, "             fits in {needs} with {keys}: {}", describe(&small))?;
        }
        Ok(())
    }

    fn traffic(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let traffic = &self.plan.traffic;
        let busiest = traffic.iter().max_by_key(|sent| sent.total()).copied().unwrap_or_default();
        let axes = [("tp", busiest.tp), ("pp", busiest.pp), ("dp", busiest.dp), ("cp", busiest.cp)];
        let experts = self.plan.job.decoder.experts.as_ref().map(|_| ("ep", busiest.ep));
        let between = match busiest.between_groups {
            0 => String::new(),
            sent => format!(" (between ZeRO's groups {})", bytes(sent)),
        };
        let sent = |(axis, sent)| format!("{axis} {}{}", bytes(sent), if axis == "dp" { &between } else { "" });
        let axes: Vec<String> = axes.into_iter().chain(experts).map(sent).collect();
        writeln!(
            f,
            "sent         {} per rank and step{}",
            axes.join(", "),
            if traffic.len() > 1 { ", at most" } else { "" }
        )
    }

    /// What GRPO does before a step, which is not in the step's time.
    fn draws(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(draws) = &self.plan.draws else { return Ok(()) };
        let DrawTime { prompts, token, tokens, sequences, scores, steps } = *draws;
        let before = if steps > 1 { format!("every {steps} steps") } else { "every step".into() };
        write!(
            f,
            "draws        at least {} before {before}: prompts {}, {tokens} tokens of {sequences} completions a rank {} each",
            seconds(draws.total()),
            seconds(prompts),
            seconds(token)
        )?;
        if scores > 0.0 {
            write!(f, ", log-probabilities {}", seconds(scores))?;
        }
        writeln!(f)
    }

    fn others(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (found, is_in_fp8) = (self.found, !self.plan.job.fp8.is_empty());
        let fits = self.plan.memory[self.plan.fullest()].peak() <= self.hardware.memory;
        if let (false, Some(nearest)) = (fits, &found.nearest) {
            writeln!(f, "nearest that fits\n{}", line(nearest))?;
        }
        if found.legal == 0 {
            let global = self.plan.job.batch_sizes().global;
            let nearest: Vec<String> = found.legal_gpus.iter().map(|gpus| format!("--gpus {gpus}")).collect();
            let nearest = if nearest.is_empty() { "none".into() } else { nearest.join(", ") };
            return writeln!(
                f,
                "no layout of {} GPUs divides layers, heads, sequences and a global batch of {global}; nearest legal: {nearest}",
                self.gpus
            );
        }
        if found.best.is_empty() {
            return writeln!(f, "none of {} legal layouts on {} x {} fits", found.legal, self.gpus, self.name);
        }
        writeln!(
            f,
            "fastest of {} legal layouts on {} x {}{}, the best of each TP x PP x CP: step, memory, largest cost besides \
             arithmetic",
            found.legal,
            self.gpus,
            self.name,
            if is_in_fp8 { " in FP8" } else { "" }
        )?;
        found.best.iter().try_for_each(|candidate| writeln!(f, "{}", line(candidate)))?;
        let Some(other) = self.other.filter(|other| !other.best.is_empty()) else { return Ok(()) };
        let narrow = self.plan.job.state_bytes.main_grads < StateBytes::F32.main_grads;
        let what = match (is_in_fp8, narrow) {
            (true, _) => "without FP8",
            (false, false) => "with fp8.format = hybrid",
            (false, true) => "with fp8.format = hybrid and optimizer.main-grads-dtype = f32, which FP8 needs",
        };
        writeln!(f, "the same {what}")?;
        other.best.iter().try_for_each(|candidate| writeln!(f, "{}", line(candidate)))
    }
}

fn line(candidate: &Candidate) -> String {
    let Candidate { job, memory, time } = candidate;
    let layout = describe(job);
    let by_cost = StageLayout::by_cost(&job.decoder.part_costs(job.seq), job.schedule.placement());
    let counts = job.stages.layer_counts();
    let layers = match by_cost {
        _ if counts.iter().all(|count| *count == counts[0]) => String::new(),
        Some(by_cost) if by_cost == job.stages => ", pipeline.layout auto".into(),
        _ => format!(", pipeline.layout {}", job.stages),
    };
    format!("  {:>8}  {:>9}  {layout}: {}{layers}", seconds(time.step), bytes(memory.peak()), time.limit())
}
