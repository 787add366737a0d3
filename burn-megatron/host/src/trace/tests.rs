//! Timelines written by hand, and recorded ones read back.

use std::time::Instant;

use serde_json::Value;

use super::{
    Category, DeviceClock, DeviceTimes, Lane, Recorder, Span, SpanKind, Track, busy, idle_share, write_chrome,
};
use crate::schedule::{Action, Costs, Link, Pass, Schedule, ScheduleKind, ScheduleSpec, simulate};

fn span(kind: SpanKind, start: u64, end: u64) -> Span {
    Span { kind, chunk: None, micro_batch: None, start, end, track: Track::Host }
}

fn read_back(lanes: &[Lane]) -> Vec<Value> {
    let mut text = Vec::new();
    write_chrome(&mut text, lanes).unwrap();
    let value: Value = serde_json::from_slice(&text).unwrap();
    value["traceEvents"].as_array().unwrap().clone()
}

/// A step with a message and a recomputation inside its passes.
fn record(origin: Instant) -> Vec<Span> {
    let mut recorder = Recorder::new(origin);
    let step = recorder.begin();
    for micro_batch in 0..2 {
        let mark = recorder.begin();
        let inner = recorder.begin();
        recorder.end(inner, SpanKind::GatherParameters, Some(1), None);
        recorder.end(mark, SpanKind::Forward, Some(1), Some(micro_batch));
        let mark = recorder.begin();
        let inner = recorder.begin();
        recorder.end(inner, SpanKind::Recompute, Some(1), Some(micro_batch));
        recorder.end(mark, SpanKind::Backward, Some(1), Some(micro_batch));
    }
    recorder.end(step, SpanKind::Step, None, None);
    let spans = recorder.take();
    assert!(recorder.take().is_empty());
    spans
}

#[test]
fn recorded_spans_are_monotone_and_nest() {
    let spans = record(Instant::now());
    assert_eq!(spans.len(), 9);
    assert!(spans.iter().all(|span| span.start <= span.end));
    assert!(spans.is_sorted_by_key(|span| span.end), "in the order in which they ended");
    for (index, one) in spans.iter().enumerate() {
        for other in &spans[index + 1..] {
            let apart = one.end <= other.start;
            let inside = other.start <= one.start && one.end <= other.end;
            assert!(apart || inside, "{one:?} and {other:?}");
        }
    }
}

#[test]
fn a_recorder_that_is_off_notes_nothing() {
    let mut recorder = Recorder::off();
    let mark = recorder.begin();
    recorder.end(mark, SpanKind::Forward, None, None);
    assert!(!recorder.is_on() && recorder.take().is_empty());
    // What began before it was switched on has no beginning.
    let mut recorder = Recorder::new(Instant::now());
    recorder.end(mark, SpanKind::Forward, None, None);
    assert!(recorder.take().is_empty());
}

#[test]
fn the_trace_names_ranks_and_tells_step_chunk_and_micro_batch() {
    let origin = Instant::now();
    let lane = |rank, process, name: &str| Lane { process, rank, name: name.into(), steps: vec![(3, record(origin))] };
    let lanes = [lane(0, 0, "rank 0 (pp 0)"), lane(1, 0, "rank 1 (pp 1)"), lane(2, 1, "rank 2 \"quoted\"")];
    let events = read_back(&lanes);
    let of = |name: &str| events.iter().filter(|event| event["name"] == name).cloned().collect::<Vec<_>>();
    assert_eq!(of("process_name").len(), 2);
    let names: Vec<_> = of("thread_name").iter().map(|event| event["args"]["name"].clone()).collect();
    assert_eq!(names, ["rank 0 (pp 0)", "rank 1 (pp 1)", "rank 2 \"quoted\""]);
    let forward = &of("forward")[1];
    assert_eq!((&forward["ph"], &forward["cat"]), (&"X".into(), &"compute".into()));
    assert_eq!(forward["args"], serde_json::json!({ "step": 3, "chunk": 1, "micro-batch": 1 }));
    assert_eq!(of("step")[2]["pid"], 1);
    assert_eq!(of("step")[2]["args"], serde_json::json!({ "step": 3 }));
}

#[test]
fn times_are_microseconds() {
    let steps = vec![(1, vec![span(SpanKind::Send, 1_500, 2_001_750)])];
    let events = read_back(&[Lane { process: 0, rank: 4, name: String::new(), steps }]);
    let event = events.last().unwrap();
    assert_eq!((event["ts"].as_f64(), event["dur"].as_f64()), (Some(1.5), Some(2000.25)));
    assert_eq!((&event["tid"], &event["cat"]), (&4.into(), &"communication".into()));
}

#[test]
fn only_the_innermost_span_counts() {
    let spans = [
        span(SpanKind::Step, 0, 100),
        span(SpanKind::Forward, 10, 40),
        span(SpanKind::GatherParameters, 10, 15),
        span(SpanKind::Backward, 50, 90),
        span(SpanKind::Recompute, 50, 70),
        span(SpanKind::Wait, 60, 65),
        span(SpanKind::Update, 90, 100),
    ];
    assert_eq!(busy(&spans), 25 + 40 - 5);
    // The order in which spans end is the recorder's, and makes no difference.
    let mut by_end = spans;
    by_end.sort_by_key(|span| span.end);
    assert_eq!(busy(&by_end), 60);
}

/// A device that is 1000 ns behind its host, waits for a while, and has a gather and two messages overlapped with it.
struct Behind(u64);

impl DeviceClock for Behind {
    fn stamp(&mut self) -> usize {
        self.0 += 1;
        self.0 as usize - 1
    }

    fn read(&mut self) -> DeviceTimes {
        let stamps = (0..std::mem::take(&mut self.0)).map(|stamp| 1000 + 10 * stamp).collect();
        let others = vec![
            (SpanKind::Wait, Track::Device, 1022, 1026),
            (SpanKind::GatherParameters, Track::Gathers, 1005, 1040),
            (SpanKind::Send, Track::Sends, 1010, 1030),
            (SpanKind::Send, Track::Sends, 1000, 1020),
        ];
        DeviceTimes { stamps, others }
    }
}

#[test]
fn a_device_has_times_of_its_own_and_these_decide() {
    let mut recorder = Recorder::new(Instant::now()).with_device(Some(Box::new(Behind(0))));
    for _ in 0..2 {
        let outer = recorder.begin();
        let inner = recorder.begin();
        recorder.end(inner, SpanKind::Recompute, Some(0), Some(2));
        recorder.end(outer, SpanKind::Backward, Some(0), Some(2));
        let spans = recorder.take();
        let of = |track| spans.iter().filter(|span| span.track == track).copied().collect::<Vec<_>>();
        let device: Vec<_> = of(Track::Device).iter().map(|span| (span.kind, span.start, span.end)).collect();
        let expected =
            [(SpanKind::Recompute, 1010, 1020), (SpanKind::Backward, 1000, 1030), (SpanKind::Wait, 1022, 1026)];
        assert_eq!(device, expected);
        assert_eq!((of(Track::Host).len(), busy(&spans)), (2, 26), "standing still is not computing");
        let overlapped = of(Track::Gathers);
        assert_eq!(
            (overlapped[0].kind, overlapped[0].start, overlapped[0].end),
            (SpanKind::GatherParameters, 1005, 1040)
        );
        let events = read_back(&[Lane { process: 0, rank: 1, name: "rank 1".into(), steps: vec![(1, spans.clone())] }]);
        let names: Vec<_> = events.iter().filter_map(|event| event["args"]["name"].as_str()).collect();
        let tracks = ["compute", "gathers of weights", "sends", "sends (2)"].map(|track| format!("rank 1, {track}"));
        assert_eq!(names, [&["process 0".into(), "rank 1".into()], &tracks[..]].concat());
        // Two messages at the same time are in different lines, and no two threads are one.
        let sends: Vec<_> = events.iter().filter(|event| event["name"] == "send").map(|event| &event["tid"]).collect();
        assert!(sends.len() == 2 && sends[0] != sends[1], "{sends:?}");
        let threads: Vec<_> = events.iter().filter(|event| event["name"] == "thread_name").collect();
        let ids: std::collections::HashSet<_> = threads.iter().map(|event| event["tid"].as_u64()).collect();
        assert_eq!(ids.len(), threads.len());
    }
    assert!(recorder.take_device().is_some());
}

/// 1F1B with two stages, four micro-batches, a forward of 10 and a backward of 20: (p - 1) / (m + p - 1) of the step.
#[test]
fn the_bubble_of_a_pipeline_is_the_formula_s() {
    let (forward, backward) = (|at| span(SpanKind::Forward, at, at + 10), |at| span(SpanKind::Backward, at, at + 20));
    let first = [
        forward(1000),
        forward(1010),
        span(SpanKind::Receive, 1020, 1040),
        backward(1040),
        forward(1060),
        backward(1070),
        forward(1090),
        backward(1100),
        span(SpanKind::Receive, 1120, 1130),
        backward(1130),
        span(SpanKind::Update, 1150, 1400),
    ];
    let last: Vec<Span> = (0..4).flat_map(|micro| [forward(1010 + micro * 30), backward(1020 + micro * 30)]).collect();
    assert_eq!((busy(&first), busy(&last)), (120, 120));
    let share = idle_share(&[&first, &last]).unwrap();
    assert!((share - 1.0 / 5.0).abs() < 1e-12, "{share}");
    assert_eq!(idle_share(&[&[], &[]]), None);
}

/// What a recorder would note if the ranks did as the simulator says.
fn as_recorded(spans: &[crate::schedule::Span]) -> Vec<Span> {
    let note = |span: &crate::schedule::Span| {
        let Action::Compute(work) = span.action else { return None };
        let kind = match work.pass {
            Pass::Forward => SpanKind::Forward,
            Pass::Backward => SpanKind::Backward,
            Pass::BackwardInput => SpanKind::BackwardInput,
            Pass::BackwardWeight => SpanKind::BackwardWeight,
        };
        let (chunk, micro_batch) = (Some(work.chunk), Some(work.micro_batch));
        Some(Span { kind, chunk, micro_batch, start: span.start, end: span.end, track: Track::Host })
    };
    spans.iter().filter_map(note).collect()
}

#[test]
fn bubbles_as_seen_and_simulated_are_the_same_number() {
    for kind in ScheduleKind::ALL {
        let ranks = if kind == ScheduleKind::NoPipeline { 1 } else { 4 };
        let spec = ScheduleSpec::new(kind, ranks, 8);
        let spec = if kind == ScheduleKind::Interleaved { spec.with_virtual_pipeline(2) } else { spec };
        let schedule = Schedule::new(spec).unwrap();
        let placement = schedule.placement();
        // Stages that are not alike.
        let layers: Vec<usize> = (0..placement.stages()).map(|stage| 2 + stage % 3).collect();
        let costs = Costs::per_layer(&layers, 10, 9, 8);
        let timeline = simulate(&schedule, &costs, Link::Overlapped).unwrap();
        let ranks: Vec<Vec<Span>> = timeline.ranks.iter().map(|spans| as_recorded(spans)).collect();
        let ranks: Vec<&[Span]> = ranks.iter().map(Vec::as_slice).collect();
        let seen = idle_share(&ranks).unwrap();
        assert!((seen - timeline.idle_share()).abs() < 1e-12, "{kind:?}: {seen}");
    }
}

#[test]
fn names_are_different_and_every_kind_is_named() {
    for (index, what) in SpanKind::ALL.into_iter().enumerate() {
        assert!(SpanKind::ALL[..index].iter().all(|other| other.name() != what.name()), "{what}");
        assert_eq!(what as usize, index, "ALL lists every variant in order");
    }
    assert_eq!(SpanKind::Recompute.category(), Category::Compute);
    assert_eq!(SpanKind::PartialSums.category().name(), "communication");
}
