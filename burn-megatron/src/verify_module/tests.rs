//! What the comparison sees. Whole proofs, in double precision, are `tests/verify_stages`.

use super::compare::compare;
use super::*;
use crate::learner::{ModuleTrace, Named};
use crate::verify::TOLERANCE;

fn trace_of(weight: f64) -> ModuleTrace {
    let named = |values: &[(&str, f64)]| -> Named {
        values.iter().map(|(path, value)| ((*path).to_owned(), vec![*value, 3.0])).collect()
    };
    let gradients = vec![named(&[("encoder.weight", weight), ("head.bias", 1.0)])];
    ModuleTrace { losses: vec![2.0], gradients, parameters: named(&[("encoder.weight", 4.0)]) }
}

#[test]
fn differences_are_relative_to_the_norm_and_say_where() {
    let one = trace_of(4.0);
    let found = compare(&one, &[one.clone(), trace_of(4.5)], TOLERANCE);
    assert!((found.gradients.relative - 0.1).abs() < 1e-15, "{found:?}");
    assert_eq!(found.gradients.at, "gradient of encoder.weight, step 0, rank 1");
    assert_eq!((found.loss.relative, found.parameters.relative), (0.0, 0.0));
    assert!(compare(&one, &[trace_of(f64::NAN)], TOLERANCE).gradients.relative.is_nan());
}

#[test]
fn a_gradient_may_be_on_one_rank_only_but_not_on_none() {
    let one = trace_of(4.0);
    let without = |path: &str| {
        let mut trace = one.clone();
        trace.gradients[0].remove(path);
        trace
    };
    assert!(compare(&one, &[without("head.bias"), without("encoder.weight")], TOLERANCE).pass());
    let found = compare(&one, &[without("head.bias"), without("head.bias")], TOLERANCE);
    assert_eq!(found.gradients.at, "gradient of head.bias, step 0, which no rank has");
    assert!(!found.pass() && found.gradients.relative.is_infinite());
    assert!(!compare(&without("head.bias"), &[one], TOLERANCE).pass());
}

#[test]
fn layouts_that_are_not_for_any_module_are_refused() {
    for (layout, nearest) in [
        ("TP2 PP2", "TP2"),
        ("EP2 DP2", "DP2"),
        ("TP2 SP CP2 DP3 ZeRO1", "TP2 SP DP3 ZeRO1"),
        ("SP DP2", "DP2"),
        ("TP2 ZeRO1", "TP2"),
    ] {
        let layout: ParallelLayout = layout.parse().unwrap();
        let error = verify_module(
            |_| -> burn::nn::Linear { unreachable!() },
            |_, _, _| unreachable!(),
            std::slice::from_ref(&layout),
        );
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with(&format!("layout {layout}: ")), "{error}");
        assert!(error.contains(&format!("nearest legal: {nearest}. ")), "{error}");
    }
    for_any_module(&"TP2 SP DP4 ZeRO2".parse().unwrap()).unwrap();
}

#[test]
fn items_divide_over_the_ranks_of_every_layout() {
    assert_eq!([2, 3, 4].into_iter().fold(1, lcm), 12);
    assert_eq!((ITEMS.next_multiple_of(12), ITEMS.next_multiple_of(3), ITEMS.next_multiple_of(1)), (12, 9, 8));
}
