//! A lane per rank, readable on light and dark pages.

use std::fmt::Write;

use super::{Extent, Pass, Ticks, Timeline, passes};

const LEFT: f64 = 64.0;
const TOP: f64 = 58.0;
const LANE: f64 = 24.0;
const PITCH: f64 = 30.0;
/// Width of the lanes.
const WIDTH: std::ops::RangeInclusive<f64> = 520.0..=1600.0;
/// Width of a digit in a pass.
const DIGIT: f64 = 6.6;

/// The timeline as an SVG document with a title, a line below it, a time axis and a legend.
///
/// Colours of the passes carry their own text; text on the page's background follows its colour scheme.
pub fn svg(timeline: &Timeline, title: &str, below: &str) -> String {
    let extent = Extent::of(timeline);
    let cell = DIGIT * extent.digits as f64 + 8.0;
    let width = (cell * extent.makespan as f64 / extent.shortest as f64).clamp(*WIDTH.start(), *WIDTH.end());
    let scale = width / extent.makespan as f64;
    let bottom = TOP + PITCH * timeline.ranks.len() as f64;
    let (legend, legend_end) = legend(&extent, bottom + 46.0);
    let (full_width, height) = ((LEFT + width).max(legend_end) + 16.0, bottom + 60.0);

    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {full_width:.0} {height:.0}\" width=\"{full_width:.0}\" \
         height=\"{height:.0}\" role=\"img\">\n<title>{}</title>\n{}",
        escape(title),
        style(&extent)
    );
    _ = writeln!(svg, "<text class=\"title\" x=\"12\" y=\"24\">{}</text>", escape(title));
    _ = writeln!(svg, "<text class=\"note\" x=\"12\" y=\"43\">{}</text>", escape(below));
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let y = TOP + PITCH * rank as f64;
        _ = writeln!(svg, "<text class=\"note\" x=\"12\" y=\"{:.1}\">rank {rank}</text>", y + 16.0);
        _ = writeln!(
            svg,
            "<rect class=\"idle\" x=\"{LEFT}\" y=\"{y}\" width=\"{width:.1}\" height=\"{LANE}\" rx=\"3\"/>"
        );
        for (work, start, end) in passes(spans) {
            let (x, wide) = (LEFT + start as f64 * scale, (end - start) as f64 * scale);
            let class = class(work.pass, work.chunk);
            let hint = format!("{work}, {start} to {end}");
            _ = write!(
                svg,
                "<g><title>{hint}</title><rect class=\"{class}\" x=\"{:.2}\" y=\"{y}\" width=\"{:.2}\" height=\"{LANE}\" rx=\"2\"/>",
                x + 0.5,
                (wide - 1.0).max(0.5),
            );
            let label = work.micro_batch.to_string();
            if wide >= DIGIT * label.len() as f64 + 3.0 {
                let (x, y) = (x + wide / 2.0, y + 16.0);
                _ = write!(svg, "<text class=\"t{class}\" x=\"{x:.2}\" y=\"{y:.1}\">{label}</text>");
            }
            svg += "</g>\n";
        }
    }
    axis(&mut svg, &extent, scale, bottom);
    svg + &legend + "</svg>\n"
}

fn class(pass: Pass, chunk: usize) -> String {
    format!("{}{chunk}", pass.letter().to_ascii_lowercase())
}

fn style(extent: &Extent) -> String {
    let mut style = String::from(
        "<style>\ntext{font-family:ui-sans-serif,system-ui,\"Helvetica Neue\",Arial,sans-serif;font-size:11px}\n\
         .title{font-size:15px;font-weight:600;fill:#1f2328}\n.note{font-size:12px;fill:#59636e}\n\
         .idle{fill:#8b949e;fill-opacity:.16}\n.axis{stroke:#8b949e;stroke-width:1;fill:none}\n",
    );
    for &pass in &extent.kinds {
        for chunk in 0..extent.chunks {
            let (class, color) = (class(pass, chunk), color(pass, chunk, extent.chunks));
            let [r, g, b] = color;
            let light = 299 * u32::from(r) + 587 * u32::from(g) + 114 * u32::from(b) > 150_000;
            let ink = if light { "#10151c" } else { "#ffffff" };
            _ = writeln!(style, ".{class}{{fill:#{r:02x}{g:02x}{b:02x}}}.t{class}{{fill:{ink};text-anchor:middle}}");
        }
    }
    style + "@media (prefers-color-scheme:dark){.title{fill:#f0f6fc}.note{fill:#9198a1}}\n</style>\n"
}

/// A colour per pass, lighter from chunk to chunk.
fn color(pass: Pass, chunk: usize, chunks: usize) -> [u8; 3] {
    let base = match pass {
        Pass::Forward => [0x2f, 0x6d, 0xb5],
        Pass::Backward => [0x2e, 0x8b, 0x57],
        Pass::BackwardInput => [0x12, 0x8a, 0x8f],
        Pass::BackwardWeight => [0xc7, 0x6a, 0x15],
    };
    let lighter = if chunks > 1 { 0.6 * chunk as f64 / (chunks - 1) as f64 } else { 0.0 };
    base.map(|part: u8| (f64::from(part) + (255.0 - f64::from(part)) * lighter).round() as u8)
}

/// A line with at most a dozen marks at round numbers.
fn axis(svg: &mut String, extent: &Extent, scale: f64, y: f64) {
    let step = (0..).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_u64.pow(power)));
    let step = step.into_iter().find(|step| extent.makespan / step <= 12).unwrap_or(extent.makespan);
    let end = LEFT + extent.makespan as f64 * scale;
    _ = writeln!(svg, "<path class=\"axis\" d=\"M{LEFT} {y}H{end:.1}\"/>");
    for mark in (0..=extent.makespan).step_by(step as usize) {
        let x = LEFT + mark as Ticks as f64 * scale;
        _ = writeln!(svg, "<path class=\"axis\" d=\"M{x:.1} {y}v4\"/>");
        _ = writeln!(
            svg,
            "<text class=\"note\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{mark}</text>",
            y + 17.0
        );
    }
}

/// The legend and where it ends.
fn legend(extent: &Extent, y: f64) -> (String, f64) {
    let of_pass = |pass: Pass| ((0..extent.chunks).map(|chunk| class(pass, chunk)).collect(), pass.name());
    let mut entries: Vec<(Vec<String>, &str)> = extent.kinds.iter().map(|&pass| of_pass(pass)).collect();
    entries.push((vec!["idle".into()], "idle"));
    let later =
        if extent.chunks > 1 { "lighter: later chunks; numbers: micro-batches" } else { "numbers: micro-batches" };
    entries.push((Vec::new(), later));
    let (mut svg, mut x) = (String::new(), LEFT);
    for (classes, name) in entries {
        for class in classes {
            let top = y - 10.0;
            _ = writeln!(svg, "<rect class=\"{class}\" x=\"{x}\" y=\"{top:.1}\" width=\"12\" height=\"12\" rx=\"2\"/>");
            x += 14.0;
        }
        _ = writeln!(svg, "<text class=\"note\" x=\"{:.1}\" y=\"{y:.1}\">{name}</text>", x + 3.0);
        x += 20.0 + 6.6 * name.chars().count() as f64;
    }
    (svg, x)
}

/// Text as it stands in a document.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
