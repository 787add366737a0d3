//! One line per rank.

use std::fmt::Write;

use super::{Extent, Pass, Span, Ticks, Timeline, Work, passes};

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
/// that, a column shows what fills most of its time.
pub fn text(timeline: &Timeline, width: usize, colors: Colors) -> String {
    let extent = Extent::of(timeline);
    let label = format!("rank {}  ", timeline.ranks.len().saturating_sub(1)).len();
    let room = width.saturating_sub(label).max(1) as Ticks;
    // The shortest pass needs room for its letter and number.
    let wanted = (extent.makespan * (1 + extent.digits as Ticks)).div_ceil(extent.shortest);
    let mut text = String::new();
    for (rank, spans) in timeline.ranks.iter().enumerate() {
        text += &format!("{:label$}", format!("rank {rank}"));
        text += &match wanted <= room {
            true => in_full(spans, extent.makespan, wanted, colors),
            false => in_short(spans, extent.makespan, room, colors),
        };
        text.push('\n');
    }
    text + &legend(&extent, label, colors)
}

/// Every pass with its number.
fn in_full(spans: &[Span], makespan: Ticks, columns: Ticks, colors: Colors) -> String {
    let column = |ticks: Ticks| (2 * ticks * columns + makespan) / (2 * makespan);
    let mut line = String::new();
    let mut at = 0;
    for (work, start, end) in passes(spans) {
        let (start, end) = (column(start), column(end));
        line.extend(std::iter::repeat_n(IDLE, (start - at) as usize));
        line += &cell(work, (end - start) as usize, colors);
        at = end;
    }
    line.extend(std::iter::repeat_n(IDLE, (columns - at) as usize));
    line
}

/// The pass that takes most of each column's time, or idle.
fn in_short(spans: &[Span], makespan: Ticks, columns: Ticks, colors: Colors) -> String {
    // By column: the time of each pass and parity of the chunk, in fractions of a tick so that columns have whole ends.
    let mut times = vec![[0; 8]; columns as usize];
    for (work, start, end) in passes(spans) {
        let (start, end) = (start * columns, end * columns);
        for column in start / makespan..end.div_ceil(makespan) {
            let inside = end.min((column + 1) * makespan) - start.max(column * makespan);
            times[column as usize][2 * (work.pass as usize) + work.chunk % 2] += inside;
        }
    }
    let mut line = String::new();
    for times in times {
        let most = (0..8).max_by_key(|&index| times[index]).unwrap_or(0);
        let pass = [Pass::Forward, Pass::Backward, Pass::BackwardInput, Pass::BackwardWeight][most / 2];
        match 2 * times.iter().sum::<Ticks>() < makespan {
            true => line.push(IDLE),
            false => line += &colored(&letter(pass, most % 2).to_string(), pass, most % 2, colors),
        }
    }
    line
}

const IDLE: char = '·';

fn cell(work: Work, columns: usize, colors: Colors) -> String {
    let label = format!("{}{}", letter(work.pass, work.chunk), work.micro_batch);
    let fill = if colors == Colors::Off { '─' } else { ' ' };
    let padding = String::from(fill).repeat(columns.saturating_sub(label.len()));
    colored(&(label + &padding), work.pass, work.chunk, colors)
}

fn letter(pass: Pass, chunk: usize) -> char {
    if chunk.is_multiple_of(2) { pass.letter() } else { pass.letter().to_ascii_lowercase() }
}

fn colored(text: &str, pass: Pass, chunk: usize, colors: Colors) -> String {
    match colors {
        Colors::Off => text.to_string(),
        Colors::Ansi => format!("{}{text}{RESET}", ansi(pass, chunk)),
    }
}

fn legend(extent: &Extent, label: usize, colors: Colors) -> String {
    let mut text = format!("{:label$}", "");
    for &pass in &extent.kinds {
        let letter = match colors {
            Colors::Off => pass.letter().to_string(),
            Colors::Ansi => colored(&format!(" {} ", pass.letter()), pass, 0, colors),
        };
        _ = write!(text, "{letter} {}   ", pass.name());
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
