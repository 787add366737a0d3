//! A picture of how full the experts are, readable on light and dark pages.

use std::fmt::Write;

use crate::engine::ExpertLoad;
use crate::schedule::draw::escape;

const LEFT: f64 = 72.0;
const TOP: f64 = 58.0;
const ROW: f64 = 22.0;
/// Width of all cells of a layer.
const WIDTH: f64 = 640.0;
const WIDEST_CELL: f64 = 64.0;
/// What a digit in a cell takes.
const DIGIT: f64 = 6.6;

/// The load of the experts as an SVG document: a row for each layer, a cell for each expert with its tokens relative to
/// the layer's mean, and the layer's own statistics to the right of them.
pub fn expert_map(layers: &[ExpertLoad], title: &str, below: &str) -> String {
    let experts = layers.iter().map(|layer| layer.tokens.len()).max().unwrap_or(0).max(1);
    let cell = (WIDTH / experts as f64).min(WIDEST_CELL);
    let (right, bottom) = (LEFT + cell * experts as f64, TOP + ROW * layers.len() as f64);
    let (width, height) = (right.max(LEFT + 420.0) + 330.0, bottom + 62.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" width=\"{width:.0}\" \
         height=\"{height:.0}\" role=\"img\">\n<title>{title}</title>\n{STYLE}",
        title = escape(title),
    );
    _ = writeln!(svg, "<text class=\"title\" x=\"12\" y=\"24\">{}</text>", escape(title));
    _ = writeln!(svg, "<text class=\"note\" x=\"12\" y=\"43\">{}</text>", escape(below));
    for (index, load) in layers.iter().enumerate() {
        row(&mut svg, load, TOP + ROW * index as f64, cell, right);
    }
    axis(&mut svg, experts, cell, bottom);
    legend(&mut svg, bottom + 46.0);
    svg + "</svg>\n"
}

fn row(svg: &mut String, load: &ExpertLoad, y: f64, cell: f64, right: f64) {
    let mean = load.tokens.iter().sum::<u64>() as f64 / load.tokens.len().max(1) as f64;
    _ = writeln!(svg, "<text class=\"note\" x=\"12\" y=\"{:.1}\">layer {}</text>", y + 15.0, load.layer);
    for (expert, tokens) in load.tokens.iter().enumerate() {
        let ratio = if mean > 0.0 { *tokens as f64 / mean } else { 0.0 };
        let x = LEFT + cell * expert as f64;
        let ([r, g, b], ink) = color(ratio);
        _ = write!(
            svg,
            "<g><title>layer {}, expert {expert}: {tokens} copies of tokens, {ratio:.2} of the mean</title>\
             <rect x=\"{:.2}\" y=\"{y:.1}\" width=\"{:.2}\" height=\"{:.1}\" rx=\"2\" fill=\"#{r:02x}{g:02x}{b:02x}\"/>",
            load.layer,
            x + 0.5,
            (cell - 1.0).max(0.5),
            ROW - 2.0,
        );
        let label = format!("{ratio:.2}");
        if cell >= DIGIT * label.len() as f64 + 3.0 {
            let (x, y) = (x + cell / 2.0, y + 14.0);
            _ = write!(svg, "<text class=\"cell\" fill=\"{ink}\" x=\"{x:.2}\" y=\"{y:.1}\">{label}</text>");
        }
        *svg += "</g>\n";
    }
    let dropped = match load.dropped {
        0 => String::new(),
        dropped => format!(", {dropped} dropped"),
    };
    let said = format!("max / mean {:.2}, entropy {:.2}{dropped}", load.balance(), load.entropy);
    _ = writeln!(svg, "<text class=\"note\" x=\"{:.1}\" y=\"{:.1}\">{said}</text>", right + 10.0, y + 15.0);
}

/// Numbers of at most a dozen experts.
fn axis(svg: &mut String, experts: usize, cell: f64, y: f64) {
    let steps = (0..).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_usize.pow(power)));
    let step = steps.into_iter().find(|step| experts / step <= 12).unwrap_or(experts);
    for expert in (0..experts).step_by(step) {
        let x = LEFT + cell * (expert as f64 + 0.5);
        _ = writeln!(
            svg,
            "<text class=\"note\" x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{expert}</text>",
            y + 15.0
        );
    }
    _ = writeln!(svg, "<text class=\"note\" x=\"12\" y=\"{:.1}\">expert</text>", y + 15.0);
}

fn legend(svg: &mut String, y: f64) {
    let mut x = LEFT;
    for (ratio, name) in [(0.0, "0"), (0.5, "0.5"), (1.0, "1"), (1.5, "1.5"), (2.0, "2 and more times the mean")] {
        let [r, g, b] = color(ratio).0;
        let top = y - 11.0;
        _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{top:.1}\" width=\"14\" height=\"14\" rx=\"2\" fill=\"#{r:02x}{g:02x}{b:02x}\"/>"
        );
        _ = writeln!(svg, "<text class=\"note\" x=\"{:.1}\" y=\"{y:.1}\">{name}</text>", x + 19.0);
        x += 40.0 + DIGIT * name.len() as f64;
    }
}

/// Blue below the mean, grey at it, red above; and the ink that can be read on it.
fn color(ratio: f64) -> ([u8; 3], &'static str) {
    const EMPTY: [f64; 3] = [33.0, 102.0, 172.0];
    const MEAN: [f64; 3] = [221.0, 224.0, 228.0];
    const FULL: [f64; 3] = [178.0, 24.0, 43.0];
    let (end, share) = if ratio < 1.0 { (EMPTY, 1.0 - ratio) } else { (FULL, (ratio - 1.0).min(1.0)) };
    let mixed = std::array::from_fn(|part| (MEAN[part] + (end[part] - MEAN[part]) * share).round() as u8);
    let [r, g, b] = mixed;
    let light = 299 * u32::from(r) + 587 * u32::from(g) + 114 * u32::from(b) > 140_000;
    (mixed, if light { "#10151c" } else { "#ffffff" })
}

const STYLE: &str = "<style>\ntext{font-family:ui-sans-serif,system-ui,\"Helvetica Neue\",Arial,sans-serif;font-size:11px}\n\
    .title{font-size:15px;font-weight:600;fill:#1f2328}\n.note{font-size:12px;fill:#59636e}\n.cell{text-anchor:middle}\n\
    @media (prefers-color-scheme:dark){.title{fill:#f0f6fc}.note{fill:#9198a1}}\n</style>\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_for_each_layer_and_a_cell_for_each_expert() {
        let load = |layer, tokens: &[u64], dropped| ExpertLoad {
            layer,
            tokens: tokens.to_vec(),
            dropped,
            entropy: 1.25,
            ..ExpertLoad::default()
        };
        let svg = expert_map(&[load(1, &[30, 10, 0, 0], 0), load(3, &[10, 10, 10, 10], 4)], "Load < 2", "step 7");
        assert!(svg.contains("Load &lt; 2") && svg.contains(">step 7<"));
        for text in [
            "layer 1, expert 0: 30 copies of tokens, 3.00 of the mean",
            "layer 1, expert 2: 0 copies of tokens, 0.00 of the mean",
            "layer 3, expert 3: 10 copies of tokens, 1.00 of the mean",
            "max / mean 3.00, entropy 1.25<",
            "max / mean 1.00, entropy 1.25, 4 dropped<",
        ] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
        // Cells and five colours of the legend.
        assert_eq!(svg.matches("<rect").count(), 8 + 5);
        assert_eq!(svg.matches("<g>").count(), svg.matches("</g>").count());
        assert_eq!((color(0.0).0, color(9.0).0), ([33, 102, 172], [178, 24, 43]));
    }

    #[test]
    fn many_experts_have_narrow_cells_without_numbers() {
        let wide = ExpertLoad { tokens: vec![1; 256], ..ExpertLoad::default() };
        let svg = expert_map(&[wide], "", "");
        assert_eq!(svg.matches("<rect").count(), 256 + 5);
        assert!(!svg.contains("class=\"cell\"") && svg.contains(">40<") && !svg.contains(">41<"), "{svg}");
        assert!(expert_map(&[], "", "").ends_with("</svg>\n"));
    }
}
