use super::*;
use backend_dist::gpu::profile::{Noted, Operation, Precision, Span};

const MS: u64 = 1_000_000;

fn noted(name: &'static str, kind: Kind, flops: f64, bytes: f64) -> Noted {
    Noted { gpu: 0, operation: Operation { name: name.into(), kind, precision: Precision::Half, flops, bytes } }
}

fn span(name: &str, start: u64, end: u64, operation: Option<usize>) -> Span {
    Span { gpu: 0, name: name.into(), start: start * MS, end: end * MS, bytes: 0, operation }
}

/// Two steps of 50 ms: two GEMMs, one with a second kernel and one overlapped with a collective, a norm, and a kernel of
/// no operation.
fn profile() -> Profile {
    Profile {
        source: Source::Cupti { version: 26 },
        window: 100 * MS,
        operations: vec![
            noted("gemm", Kind::Gemm, 10e12, 1e9),
            noted("gemm", Kind::Gemm, 10e12, 1e9),
            noted("rms_norm", Kind::Memory, 0.0, 41.5e9),
            noted("all-gather", Kind::Collective, 0.0, 9e9),
            noted("not launched", Kind::Memory, 0.0, 9e9),
        ],
        spans: vec![
            span("nvjet", 0, 18, Some(0)),
            span("_ZN6cublas6reduceEv", 18, 20, Some(0)),
            span("nvjet", 30, 50, Some(1)),
            span("norm_kernel", 50, 60, Some(2)),
            span("_Z13ncclDevKernel1", 25, 45, Some(3)),
            span("elementwise", 60, 62, None),
            Span { gpu: 1, ..span("elementwise", 0, 1, None) },
        ],
        dropped: 0,
    }
}

#[test]
fn rows_are_operations_and_what_no_operation_launched() {
    let report = ProfileReport::new(&profile(), 2, Ceilings::of("NVIDIA H200"), Some(1464.0));
    assert_eq!((report.milliseconds, report.gpus.len()), (50.0, 2));
    let rows = &report.gpus[0].rows;
    let names: Vec<&str> = rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["gemm", "all-gather", "rms_norm", "elementwise"]);
    let gemm = &rows[0];
    assert_eq!((gemm.calls, gemm.launches, gemm.milliseconds, gemm.share), (1.0, 1.5, 20.0, 0.4));
    let kernel = |name: &str, launches, milliseconds| Kernel { name: name.into(), launches, milliseconds };
    assert_eq!(gemm.kernels, [kernel("nvjet", 1.0, 19.0), kernel("cublas::reduce", 0.5, 1.0)]);
    assert_eq!(gemm.kind, "gemm");
    // 20 TFLOP in 40 ms, of 989.4 TFLOP/s.
    assert!((gemm.teraflops.unwrap() - 500.0).abs() < 1e-9);
    let share = gemm.of_ceiling.unwrap();
    assert!((share - 500.0 / 989.4).abs() < 1e-9 && (gemm.to_gain.unwrap() - 20.0 * (1.0 - share)).abs() < 1e-9);
    // 9 GB in 20 ms over links of 450 GB/s; 41.5 GB in 10 ms is exactly what a copy reaches.
    assert!((rows[1].of_ceiling.unwrap() - 1.0).abs() < 1e-9 && rows[1].kernels[0].name == "ncclDevKernel");
    assert_eq!(rows[1].to_gain, Some(2.5));
    assert!((rows[2].of_ceiling.unwrap() - 1.0).abs() < 1e-9 && rows[2].to_gain.unwrap().abs() < 1e-9);
    assert_eq!((rows[3].gigabytes, rows[3].of_ceiling), (None, None));
}

#[test]
fn times_add_up_to_the_step() {
    let totals = ProfileReport::new(&profile(), 2, Ceilings::default(), None).gpus[0].totals;
    let gemms = totals.gemms;
    assert_eq!((gemms.milliseconds, gemms.overlapped), (20.0, 10.0));
    assert!((gemms.teraflops - 500.0).abs() < 1e-9 && (gemms.teraflops_overlapped - 500.0).abs() < 1e-9);
    assert_eq!((totals.memory, totals.optimizer, totals.attention), (6.0, 0.0, Arithmetic::default()));
    // The collective runs from 25 to 45, kernels from 0 to 20 and from 30 to 62.
    assert_eq!((totals.collectives_hidden, totals.collectives_exposed), (7.5, 2.5));
    assert_eq!((totals.busy, totals.idle), (26.0, 21.5));
    assert!((totals.busy + totals.collectives_exposed + totals.idle - 50.0).abs() < 1e-9);
}

#[test]
fn the_table_says_where_its_numbers_are_from() {
    let report = ProfileReport::new(&profile(), 2, Ceilings::of("NVIDIA H200"), Some(1464.0));
    let table = text(&report);
    for part in [
        "CUPTI, API version 26",
        "bf16 989 TFLOP/s dense, fp8 1979",
        "copy 4150 GB/s",
        "H200 data sheet, SXM, copy measured",
        "500 TFLOP/s",
        // Four fifths of the clock.
        "at the 1464 MHz of the last run bf16 could reach 792 TFLOP/s",
        "nvjet + cublas::reduce 5 %",
        "communication, exposed",
        "5.0 %",
    ] {
        assert!(table.contains(part), "{part} in\n{table}");
    }
    let lines = csv(&report);
    assert_eq!(lines.lines().count(), 1 + 4 + 1, "{lines}");
    let columns: Vec<usize> = lines.lines().map(|line| line.matches(',').count()).collect();
    assert!(columns.iter().all(|count| *count == 11), "{lines}");

    let why = "it is not there".to_string();
    let events = Profile { source: Source::Events { why: why.clone() }, ..profile() };
    let table = text(&ProfileReport::new(&events, 2, Ceilings::of("an unknown card"), Some(1500.0)));
    says!(table, &why, "waiting for communication");
    assert!(!table.contains("hidden"), "{table}");
    says!(table, "an unknown card is unknown");
}
