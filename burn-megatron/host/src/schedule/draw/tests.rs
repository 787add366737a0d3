use super::*;
use crate::schedule::{Costs, Link, Schedule, ScheduleKind, ScheduleSpec, simulate};

fn timeline(spec: ScheduleSpec) -> Timeline {
    let costs = Costs::uniform(spec.placement().stages(), 1, 1, 1);
    simulate(&Schedule::new(spec).unwrap(), &costs, Link::Overlapped).unwrap()
}

fn one_f_one_b() -> ScheduleSpec {
    ScheduleSpec::new(ScheduleKind::OneFOneB, 4, 4)
}

/// Figure 4 of arXiv 2104.04473, top, with backwards twice as long as forwards.
#[test]
fn the_picture_of_1f1b() {
    let expected = "\
rank 0  F0F1F2F3············B0──··B1──··B2──··B3──
rank 1  ··F0F1F2········B0──F3B1──··B2──··B3──····
rank 2  ····F0F1····B0──F2B1──F3B2──··B3──········
rank 3  ······F0B0──F1B1──F2B2──F3B3──············
        F forward   B backward   · idle
";
    assert_eq!(text(&timeline(one_f_one_b()), 120, Colors::Off), expected);
}

#[test]
fn odd_chunks_are_small_letters() {
    let drawn = text(&timeline(one_f_one_b().with_virtual_pipeline(2)), 200, Colors::Off);
    assert!(drawn.lines().next().unwrap().starts_with("rank 0  F0F1F2F3f0f1f2f3"), "{drawn}");
    assert!(drawn.ends_with("B backward   small letters: odd chunks   · idle\n"), "{drawn}");
}

#[test]
fn no_line_is_wider_than_asked() {
    for width in [20, 40, 79, 80, 200] {
        let drawn = text(&timeline(ScheduleSpec::new(ScheduleKind::ZbH1, 8, 100)), width, Colors::Off);
        for line in drawn.lines().take(8) {
            assert_eq!(line.chars().count(), width, "{line}");
        }
    }
}

/// Ranks are busy but for three of 103 forwards and backwards, however short the line.
#[test]
fn short_lines_show_what_fills_most_of_a_column() {
    let drawn = text(&timeline(ScheduleSpec::new(ScheduleKind::OneFOneB, 4, 100)), 60, Colors::Off);
    let last = drawn.lines().nth(3).unwrap();
    assert_eq!(last.matches('·').count(), 2, "{last}");
    assert!(!last.contains('F'), "a column of six ticks has two forwards and two longer backwards: {last}");
    let steady = text(&timeline(ScheduleSpec::new(ScheduleKind::GPipe, 4, 100)), 60, Colors::Off);
    assert!(steady.lines().next().unwrap().starts_with("rank 0  FFFFFFFFFFFFFFFFF"), "{steady}");
}

#[test]
fn colours_change_nothing_but_colours() {
    let plain = |text: &str| {
        let mut parts = text.split("\x1b[");
        let first = parts.next().unwrap_or("").to_string();
        parts.fold(first, |all, part| all + part.split_once('m').map_or("", |(_, rest)| rest))
    };
    let timeline = timeline(one_f_one_b());
    let colored = plain(&text(&timeline, 120, Colors::Ansi));
    let letters = text(&timeline, 120, Colors::Off).replace('─', " ");
    for (colored, letters) in colored.lines().zip(letters.lines()).take(4) {
        assert_eq!(colored, letters);
    }
}

#[test]
fn an_svg_has_every_pass_once() {
    let spec = ScheduleSpec::new(ScheduleKind::ZbV, 3, 5);
    let drawn = svg(&timeline(spec), "a < b", "& so on");
    assert!(drawn.starts_with("<svg ") && drawn.ends_with("</svg>\n"));
    assert!(drawn.contains("<title>a &lt; b</title>") && drawn.contains("&amp; so on"));
    for class in ["f0", "f1", "i0", "i1", "w0", "w1"] {
        // One in the legend.
        assert_eq!(drawn.matches(&format!("<rect class=\"{class}\"")).count(), 3 * 5 + 1, "{class}");
    }
    assert_eq!(drawn.matches("<g>").count(), drawn.matches("</g>").count());
}
