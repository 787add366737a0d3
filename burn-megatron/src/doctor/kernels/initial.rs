//! Compares initial weights that a GPU samples with those of the host: every layout starts from the same bits.

use backend_dist::random::{on_device, on_host};
use backend_dist::shard::{GroupPosition, Init, Section};
use burn::tensor::{DType, Device};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::KernelCheck;

const INIT: Init = Init::Normal { std: 0.02 };
const SEED: u64 = 0x1234_5678_9abc_def0;

/// The share of elements whose bits differ, which must be zero; nothing where `device` leaves drawing to the host.
pub fn check(device: &Device, dtype: DType) -> Vec<KernelCheck> {
    let one = |section: &Section| {
        let drawn = || on_device(section, INIT, SEED, device, dtype).map(|values| values.into_data());
        let found = catch_unwind(AssertUnwindSafe(drawn)).ok();
        if found.as_ref().is_some_and(Option::is_none) {
            return None;
        }
        let expected = on_host(section, INIT, SEED, 0..section.local_len(), dtype);
        let (a, size) = (expected.as_bytes(), dtype.size());
        let differ = |found: &[u8]| a.chunks(size).zip(found.chunks(size)).filter(|(a, b)| a != b).count();
        let error = found.flatten().filter(|found| found.as_bytes().len() == a.len());
        Some(KernelCheck {
            name: "initial weights: bits that differ".into(),
            dtype: format!("{dtype:?}"),
            shape: format!("{:?} of {:?}", section.local_shape(), section.global_shape),
            error: error.map_or(f64::NAN, |found| differ(found.as_bytes()) as f64 / section.local_len() as f64),
            bound: 0.0,
        })
    };
    sections().iter().filter_map(one).collect()
}

/// A whole matrix, a shard of rows with padding, a shard of columns, and one after the 2³²nd element.
fn sections() -> [Section; 4] {
    let last = |size| GroupPosition { rank: size - 1, size };
    [
        Section::replicated("whole", &[1000, 1001], GroupPosition { rank: 0, size: 1 }),
        Section::split_padded("rows", &[1001, 96], 0, 4, 1024, last(4)),
        Section::split("columns", &[300, 512], 1, 4, last(4)),
        Section::split("large", &[1 << 20, 1 << 13], 0, 1 << 16, last(1 << 16)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_hold_what_they_are_for() {
        let [_, rows, columns, large] = sections();
        let drawn = |section: &Section| on_host(section, INIT, SEED, 0..section.local_len(), DType::F64);
        let zeros = |section| drawn(section).as_slice::<f64>().unwrap().iter().filter(|value| **value == 0.0).count();
        assert_eq!((zeros(&rows), zeros(&columns)), (23 * 96, 0));
        let first = ((1u64 << 16) - 1) << 17;
        assert_eq!(drawn(&large).as_slice::<f64>().unwrap()[5], INIT.value(SEED, "large", first + 5));
        assert!(check(&Device::flex(), DType::F32).is_empty(), "the CPU's weights are the host's");
    }
}
