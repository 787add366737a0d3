use super::*;

const TINY: Scale = Scale { seq: 5, batch: 2, hidden: 12, ffn: 7, vocab: 19, ..Scale::ODD };

#[test]
fn every_operation_on_the_cpu_is_within_its_bound() {
    let device = Device::flex();
    for dtype in [DType::BF16, DType::F16, DType::F32, DType::F64] {
        for scale in [TINY, Scale::ODD] {
            let mut all = 0;
            check_scale(&device, &scale, dtype, &mut |check| {
                assert!(check.ok(), "{check:?}");
                all += 1;
            });
            assert!(all > 50, "{all} results");
        }
    }
}

#[test]
fn every_form_of_attention_on_the_cpu_is_within_its_bound() {
    for case in attention_forms(&TINY) {
        let found = check(&case, &Device::flex(), DType::F32);
        assert!(found.iter().all(KernelCheck::ok), "{found:#?}");
    }
}

#[test]
fn a_wrong_result_is_found() {
    let device = Device::flex();
    let mut twice = cases(&TINY).into_iter().find(|case| case.name == "rms_norm").unwrap();
    let right = twice.run;
    // Wrong where it is checked, right in the reference.
    twice.run = Box::new(move |side, x| {
        let y = right(side, x);
        if side.dtype == DType::F64 { y } else { y * 1.01 }
    });
    let found = check(&twice, &device, DType::F32);
    assert_eq!(found.len(), 3);
    assert!(found.iter().all(|check| !check.ok() && (check.error - 0.01).abs() < 1e-4), "{found:?}");
}

#[test]
fn an_operation_that_panics_is_not_ok() {
    let mut fails = cases(&TINY).into_iter().find(|case| case.name == "swiglu").unwrap();
    let right = fails.run;
    fails.run = Box::new(move |side, x| {
        assert!(side.dtype == DType::F64, "not in this type");
        right(side, x)
    });
    let found = check(&fails, &Device::flex(), DType::BF16);
    assert!(found.iter().all(|check| check.error.is_nan() && !check.ok()));
}

#[test]
fn errors_are_relative_to_the_norm() {
    assert_eq!(error(&[3.0, 4.0], &[3.0, 4.0]), 0.0);
    assert!((error(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-15);
    assert!(error(&[f64::NAN], &[1.0]).is_nan());
    assert!(error(&[], &[1.0]).is_nan());
    assert_eq!(error(&[0.0], &[0.0]), 0.0);
}

#[test]
fn fp8_layers_on_the_cpu_are_within_their_bounds() {
    let sizes = Scale { seq: 16, batch: 2, hidden: 48, ffn: 32, ..TINY };
    for dtype in [DType::BF16, DType::F16] {
        let found = fp8::check(&Device::flex(), &sizes, dtype);
        // Two formats, with one scale and with one for each block.
        assert_eq!(found.len(), 16);
        let experts = fp8_experts::check(&Device::flex(), &sizes, dtype);
        assert_eq!(experts.len(), 12);
        let found: Vec<KernelCheck> = found.into_iter().chain(experts).collect();
        let bad: Vec<&KernelCheck> = found.iter().filter(|check| !check.ok()).collect();
        assert!(bad.is_empty(), "{bad:#?}");
    }
    assert!(fp8::check(&Device::flex(), &sizes, DType::F32).is_empty());
}
