//! One line per rank.

use std::fmt::Write;

use super::{Extent, Pass, Timeline, Work, passes};

/// Whether the text is coloured with ANSI sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colors {
    /// Letters only.
    Off,
    /// A background colour per pass, lighter for every other chunk.
    Ansi,
}

/// One line per rank and a legend, at most `width` columns wide.
///
/// A pass is its letter and the number of its micro-batch, small letters for odd chunks. Where a line has no room for
/// that, a pass is its letter, and one of less than half a column is left out.
pub fn text(timeline: &Timeline, width: usize, colors: Colors) -> String {
    let extent = Extent::of(timeline);
    let label = format!("rank {}  ", timeline.ranks.len().saturating_sub(1)).len();
    let room = width.saturating_sub(label).max(1) as u64;
    // The shortest pass gets room for its letter and number, if the line has it.
    let wanted = (extent.makespan * (1 + extent.digits as u64)).div_ceil(extent.shortest);
    let columns = wanted.min(room);
    let column = |ticks: u64| (2 * ticks * columns + extent.makespan) / (2 * extent.makespan);

    let mut text = String::new();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        let mut line = format!("{:label$}", format!("rank {rank}"));
        let mut at = 0;
        for (work, start, end) in passes(spans) {
            let (start, end) = (column(start).max(at), column(end));
            if end > start {
                line.extend(std::iter::repeat_n(IDLE, (start - at) as usize));
                line += &cell(work, (end - start) as usize, colors);
                at = end;
            }
        }
        line.extend(std::iter::repeat_n(IDLE, (columns - at) as usize));
        text += &line;
        text.push('\n');
    }
    text + &legend(&extent, label, colors)
}

const IDLE: char = '·';

fn cell(work: Work, columns: usize, colors: Colors) -> String {
    let letter = match work.chunk % 2 {
        0 => work.pass.letter(),
        _ => work.pass.letter().to_ascii_lowercase(),
    };
    let mut label = format!("{letter}{}", work.micro_batch);
    if label.len() > columns {
        label = letter.to_string();
    }
    match colors {
        Colors::Off => format!("{label:─<columns$}"),
        Colors::Ansi => format!("{}{label:<columns$}{RESET}", ansi(work.pass, work.chunk)),
    }
}

fn legend(extent: &Extent, label: usize, colors: Colors) -> String {
    let mut text = format!("{:label$}", "");
    for &pass in &extent.kinds {
        let letter = pass.letter();
        _ = match colors {
            Colors::Off => write!(text, "{letter} {}   ", pass.name()),
            Colors::Ansi => write!(text, "{} {letter} {RESET} {}   ", ansi(pass, 0), pass.name()),
        };
    }
    if extent.chunks > 1 {
        text += "small letters: odd chunks   ";
    }
    _ = writeln!(text, "{IDLE} idle");
    text
}

const RESET: &str = "\x1b[0m";

/// Colours of the 256 that every terminal shows alike.
fn ansi(pass: Pass, chunk: usize) -> String {
    let (plain, light) = match pass {
        Pass::Forward => (25, 117),
        Pass::Backward => (28, 114),
        Pass::BackwardInput => (30, 80),
        Pass::BackwardWeight => (130, 215),
    };
    match chunk % 2 {
        0 => format!("\x1b[97;48;5;{plain}m"),
        _ => format!("\x1b[30;48;5;{light}m"),
    }
}
