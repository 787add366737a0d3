//! A bar chart of throughput: our records and the measurements of other systems, in SVG for light and dark pages.

use std::fmt::Write;
use std::path::Path;

use serde::Deserialize;

use crate::plan::thousands;
use crate::schedule::draw::escape;

/// A measurement of a system for the chart: an entry of `benchmarks/peers/*.json`, or one of our records.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measurement {
    /// Name of the model.
    pub model: String,
    /// Sequence length.
    pub seq_length: usize,
    /// Precision of GEMMs.
    pub precision: String,
    /// Number of GPUs.
    pub gpus: usize,
    /// Name of the GPU, as its driver gives it.
    pub gpu: String,
    /// Name of the system; ours is `burn-megatron`.
    pub system: String,
    /// Tokens per second and GPU.
    pub tokens_per_second_per_gpu: f64,
    /// Versions of the system and its libraries.
    pub versions: Option<String>,
    /// Day, `2026-01-31`.
    pub date: String,
    /// The command, or where the number is published.
    pub source: String,
    /// It comes from a record, not from a list.
    #[serde(skip)]
    pub is_record: bool,
}

/// Our name in the chart.
const OURS: &str = "burn-megatron";

/// The fields of a [`Record`](super::Record) that the chart needs, so that older records can be drawn too.
#[derive(Deserialize)]
struct RecordFields {
    origin: OriginFields,
    setup: SetupFields,
    device: DeviceFields,
    tokens_per_second_per_rank: f64,
}

#[derive(Deserialize)]
struct OriginFields {
    date: String,
    command: String,
}

#[derive(Deserialize)]
struct SetupFields {
    recipe: String,
    layout: String,
    ranks: usize,
    seq_length: usize,
    dtype: String,
}

#[derive(Deserialize)]
struct DeviceFields {
    name: String,
}

impl From<RecordFields> for Measurement {
    fn from(record: RecordFields) -> Self {
        let RecordFields { origin, setup, device, tokens_per_second_per_rank } = record;
        let stem = Path::new(&setup.recipe).file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let model = match stem.as_str() {
            "llama3-8b" => "Llama 3 8B".into(),
            "llama3-1b" => "Llama 3.2 1B".into(),
            _ => stem,
        };
        Self {
            model,
            seq_length: setup.seq_length,
            precision: if setup.layout.contains(", fp8") { "FP8".into() } else { setup.dtype },
            gpus: setup.ranks,
            gpu: device.name,
            system: OURS.into(),
            tokens_per_second_per_gpu: tokens_per_second_per_rank,
            versions: None,
            date: origin.date.split(' ').next().unwrap_or_default().into(),
            source: origin.command,
            is_record: true,
        }
    }
}

/// The measurements of a file: a record of `bench`, or a list of other systems' measurements. Fails if the text is
/// neither.
pub fn measurements(text: &str) -> Result<Vec<Measurement>, serde_json::Error> {
    if text.trim_start().starts_with('[') {
        return serde_json::from_str(text);
    }
    serde_json::from_str::<RecordFields>(text).map(|record| vec![record.into()])
}

/// Measurements of the same thing: ours first, then other systems, the fastest first.
struct Group {
    title: String,
    model: String,
    bars: Vec<Measurement>,
}

/// The setups that at least one other system has been measured in, in their order. Ours is an entry of the lists if
/// there is one, else the newest record.
fn groups(all: &[Measurement]) -> Vec<Group> {
    let key = |of: &Measurement| (of.model.clone(), of.seq_length, of.precision.clone(), of.gpus, of.gpu.clone());
    let mut keys = Vec::new();
    for peer in all.iter().filter(|of| of.system != OURS) {
        if !keys.contains(&key(peer)) {
            keys.push(key(peer));
        }
    }
    let group = |wanted: &_| {
        let same = || all.iter().filter(|of| key(of) == *wanted);
        let ours = same().filter(|of| of.system == OURS).max_by_key(|of| (!of.is_record, &of.date))?;
        let mut bars: Vec<Measurement> = same().filter(|of| of.system != OURS).cloned().collect();
        bars.sort_by(|a, b| b.tokens_per_second_per_gpu.total_cmp(&a.tokens_per_second_per_gpu));
        bars.insert(0, ours.clone());
        let (model, seq_length, precision, gpus, gpu) = wanted;
        let title = format!("{model}, {} tokens, {precision}, {gpus} x {gpu}", thousands(*seq_length as f64));
        Some(Group { title, model: model.clone(), bars })
    };
    keys.iter().filter_map(group).collect()
}

const WIDTH: f64 = 760.0;
/// Where bars start, and how long the longest is.
const BARS: [f64; 2] = [16.0, 540.0];
const BAR: f64 = 22.0;
const STEP: f64 = 44.0;
const TITLE: f64 = 34.0;

const STYLE: &str = "text { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #1f2328 }
.title { font-weight: 600; font-size: 14px }
.muted { fill: #59636e }
.ours { fill: #0969da }
.peer { fill: #afb8c1 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc }
.muted { fill: #9198a1 }
.ours { fill: #4493f8 }
.peer { fill: #656c76 }
}";

/// The chart. Bars of one model have one scale. `None` if no setup was measured by burn-megatron and another system.
pub fn svg(all: &[Measurement]) -> Option<String> {
    let groups = groups(all);
    if groups.is_empty() {
        return None;
    }
    let height = 40.0 + groups.iter().map(|group| TITLE + STEP * group.bars.len() as f64).sum::<f64>();
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\" aria-label=\"Training throughput in tokens per second and GPU\">\n<style>\n{STYLE}\n</style>\n"
    );
    _ = writeln!(
        out,
        "<text class=\"muted\" x=\"{}\" y=\"20\">Training throughput, tokens/s/GPU (longer is faster)</text>",
        BARS[0]
    );
    let mut y = 40.0;
    for group in &groups {
        _ = writeln!(out, "<text class=\"title\" x=\"{}\" y=\"{}\">{}</text>", BARS[0], y + 20.0, escape(&group.title));
        y += TITLE;
        let of_model = groups.iter().filter(|other| other.model == group.model).flat_map(|group| &group.bars);
        let most = of_model.map(|bar| bar.tokens_per_second_per_gpu).fold(f64::MIN_POSITIVE, f64::max);
        for bar in &group.bars {
            let rate = bar.tokens_per_second_per_gpu;
            let (length, class) = (BARS[1] * rate / most, if bar.system == OURS { "ours" } else { "peer" });
            let ratio = match group.bars.get(1) {
                Some(peer) if bar.system == OURS => format!(" ({:.2}x)", rate / peer.tokens_per_second_per_gpu),
                _ => String::new(),
            };
            _ = writeln!(
                out,
                "<text class=\"muted\" x=\"{}\" y=\"{}\">{}</text>",
                BARS[0],
                y + 10.0,
                escape(&bar.system)
            );
            _ = writeln!(
                out,
                "<rect class=\"{class}\" x=\"{}\" y=\"{}\" width=\"{length:.1}\" height=\"{BAR}\" rx=\"3\"/>",
                BARS[0],
                y + 15.0
            );
            _ = writeln!(
                out,
                "<text x=\"{:.1}\" y=\"{}\">{}{ratio}</text>",
                BARS[0] + length + 8.0,
                y + 31.0,
                thousands(rate)
            );
            y += STEP;
        }
    }
    Some(out + "</svg>\n")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use super::*;

    fn committed() -> Vec<Measurement> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../benchmarks");
        let files = |folder: PathBuf| -> Vec<PathBuf> {
            let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
            files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
            files.sort();
            files
        };
        let all = files(folder.clone()).into_iter().chain(files(folder.join("peers")));
        all.flat_map(|file| measurements(&fs::read_to_string(&file).unwrap()).unwrap()).collect()
    }

    /// `burn-megatron bench --chart docs/throughput.svg benchmarks/*.json benchmarks/peers/*.json`
    #[test]
    fn the_committed_chart_is_of_the_committed_measurements() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/throughput.svg");
        let committed_chart = fs::read_to_string(&file).unwrap_or_default();
        assert!(
            committed_chart == svg(&committed()).unwrap(),
            "{} differs: draw it again, see benchmarks/README.md",
            file.display()
        );
    }

    fn measured(system: &str, rate: f64, date: &str) -> Measurement {
        Measurement {
            model: "M & N".into(),
            seq_length: 8192,
            precision: "bf16".into(),
            gpus: 2,
            gpu: "NVIDIA H200".into(),
            system: system.into(),
            tokens_per_second_per_gpu: rate,
            versions: None,
            date: date.into(),
            source: "a run".into(),
            is_record: false,
        }
    }

    #[test]
    fn ours_comes_first_with_its_ratio_to_the_fastest_peer() {
        let all = [
            measured("slow", 5000.0, "2026-01-01"),
            measured(OURS, 9000.0, "2026-01-01"),
            measured(OURS, 11_000.0, "2026-01-02"),
            measured("fast", 10_000.0, "2026-01-01"),
            Measurement { gpus: 4, ..measured(OURS, 12_000.0, "2026-01-02") },
        ];
        let chart = svg(&all).unwrap();
        let at = |text: &str| chart.find(text).unwrap_or_else(|| panic!("{text}: {chart}"));
        assert!(at("11,000 (1.10x)") < at("10,000</text>") && at("10,000</text>") < at("5,000</text>"), "{chart}");
        says!(chart, "M &amp; N, 8,192 tokens, bf16, 2 x NVIDIA H200");
        assert!(!chart.contains("12,000"), "{chart}");
        assert_eq!(chart.matches("class=\"ours\"").count(), 1);
        assert!(chart.contains("width=\"540.0\"") && chart.contains("prefers-color-scheme: dark"));
    }

    #[test]
    fn records_and_lists_are_read() {
        let ours = committed().into_iter().filter(|of| of.system == OURS);
        let fp8 = |of: &Measurement| of.model == "Llama 3 8B" && of.precision == "FP8" && of.gpus == 4;
        assert!(ours.clone().any(|of| fp8(&of)) && ours.count() > 20);
        assert!(measurements("{}").is_err() && measurements("[{\"model\": 1}]").is_err());
    }
}
