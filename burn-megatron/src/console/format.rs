//! Formats numbers for output.

/// A value with a sensible number of digits and its unit: `2.3456`, `1.50e-4`, `12.3k`, `512 MiB`.
pub fn quantity(value: f64, unit: Option<&str>) -> String {
    let digits = digits(value);
    if let Some(unit) = unit { format!("{digits} {unit}") } else { digits }
}

fn digits(value: f64) -> String {
    match value.abs() {
        magnitude if !magnitude.is_finite() => format!("{value}"),
        0.0 => "0".to_string(),
        magnitude if magnitude < 1e-2 => format!("{value:.2e}"),
        magnitude if magnitude < 10.0 => format!("{value:.4}"),
        magnitude if magnitude < 100.0 => format!("{value:.2}"),
        magnitude if magnitude < 10_000.0 => format!("{value:.0}"),
        magnitude if magnitude < 1e6 => format!("{:.1}k", value / 1e3),
        magnitude if magnitude < 1e9 => format!("{:.1}M", value / 1e6),
        _ => format!("{value:.3e}"),
    }
}

/// A duration in seconds: `4.2 s`, `2 min 05 s`, `1 h 02 min`, `3 d 04 h`.
pub fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        3600..172_800 => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {:02} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_follow_the_magnitude() {
        let cases = [
            (2.34567, "2.3457"),
            (1.5e-4, "1.50e-4"),
            (0.0, "0"),
            (18.414, "18.41"),
            (812.4, "812"),
            (12_345.0, "12.3k"),
            (-3.2e7, "-32.0M"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "NaN"),
        ];
        for (value, text) in cases {
            assert_eq!(quantity(value, None), text);
        }
        assert_eq!(quantity(512.0, Some("MiB")), "512 MiB");
    }

    #[test]
    fn durations_change_unit() {
        assert_eq!(duration(4.21), "4.2 s");
        assert_eq!(duration(125.0), "2 min 05 s");
        assert_eq!(duration(3720.0), "1 h 02 min");
        assert_eq!(duration(3.0 * 86_400.0 + 4.0 * 3600.0), "3 d 04 h");
    }
}
