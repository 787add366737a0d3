//! How much memory a sample order takes, and whether it is there.

use std::path::Path;

use super::error::DataError;
use crate::host_memory::available;

/// Bytes of a sample's entries: where it starts, as two numbers, and its position in the shuffled order.
const SAMPLE: u64 = 12;

/// Whether so many bytes are available; else how many are.
pub(super) fn check(bytes: u64) -> Result<(), u64> {
    available().filter(|available| *available < bytes).map_or(Ok(()), Err)
}

/// The refusal of an order, with the number of samples that would do.
pub(super) fn too_large(path: &Path, samples: usize, bytes: u64, available: u64) -> DataError {
    let nearest = (u128::from(available) * samples as u128 / u128::from(bytes.max(1))) as usize;
    DataError::Order { path: path.into(), samples, bytes, available, nearest }
}

/// Whether the order of so many samples fits into memory, whatever the documents are.
///
/// # Errors
/// The bytes that it takes, those that are available, and the number of samples that would do.
pub fn check_samples(samples: usize) -> Result<(), (u64, u64, usize)> {
    let bytes = SAMPLE.saturating_mul(samples as u64);
    check(bytes).map_err(|available| (bytes, available, (available / SAMPLE) as usize))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::indexed::{Dtype, IndexedDataset, IndexedWriter};
    use super::super::{Blend, GptDataConfig, GptSplits};
    use super::*;

    #[test]
    fn an_order_that_does_not_fit_into_memory_is_refused_with_one_that_does() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = folder.path().join("data");
        let mut writer = IndexedWriter::create(&prefix, Dtype::I32).unwrap();
        writer.push_sequence(&vec![1i64; 1 << 20]).unwrap();
        writer.finish().unwrap();
        let data = [Arc::new(IndexedDataset::open(&prefix).unwrap())];
        // 47 GiB, which some machines have.
        let wanted = 4_200_000_000;
        let blends = [Blend::single(&prefix), Blend { prefixes: vec![prefix.clone()], weights: Some(vec![1.0]) }];
        for blend in blends {
            let config = GptDataConfig { num_samples: [Some(wanted), None, None], ..GptDataConfig::new(4) };
            if available().unwrap() > 40 << 30 {
                continue;
            }
            match GptSplits::from_datasets(&data, &blend, &config) {
                Err(DataError::Order { bytes, available, nearest, .. }) => {
                    assert!(bytes > available && nearest < wanted && nearest > 0, "{bytes} {available} {nearest}");
                }
                other => panic!("not refused for its size: {other:?}"),
            }
        }
        let (bytes, available, nearest) = check_samples(usize::MAX / 100).unwrap_err();
        assert!(bytes > available && check_samples(nearest / 2).is_ok());
    }
}
