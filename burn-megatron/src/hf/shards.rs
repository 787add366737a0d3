//! How tensors are divided over files, as Hugging Face does it.

use std::ops::Range;

/// Tensors that follow each other share a file while they fit into `most` bytes; a larger one has a file of its own.
pub(super) fn divide(sizes: &[u64], most: u64) -> Vec<Range<usize>> {
    let mut files: Vec<Range<usize>> = Vec::new();
    let mut filled = 0;
    for (index, &size) in sizes.iter().enumerate() {
        match files.last_mut() {
            Some(file) if filled + size <= most => {
                file.end = index + 1;
                filled += size;
            }
            _ => {
                files.push(index..index + 1);
                filled = size;
            }
        }
    }
    files
}

/// Name of file `index` of `count`.
pub(super) fn name(index: usize, count: usize) -> String {
    match count {
        1 => super::tensors::SINGLE.into(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    }
}

/// Bytes written as `5GB`, `500MB`, `20KB`, `4GiB` or a number.
///
/// # Errors
/// If it is none of these.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let units = [("", 1), ("KB", 1000), ("MB", 1000_u64.pow(2)), ("GB", 1000_u64.pow(3)), ("TB", 1000_u64.pow(4))];
    let binary = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];
    let unit = units.into_iter().chain(binary).find(|(unit, _)| *unit == text[end..].trim());
    let bytes = text[..end].parse::<u64>().ok().zip(unit).and_then(|(count, (_, unit))| count.checked_mul(unit));
    bytes.filter(|bytes| *bytes > 0).ok_or_else(|| format!("{text} is no size; legal: 5GB, 500MB, 4GiB, 1000000"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_filled_in_order() {
        assert_eq!(divide(&[3, 3, 3, 9, 1, 1], 6), [0..2, 2..3, 3..4, 4..6]);
        assert_eq!(divide(&[3, 3], 100), [0..2]);
        assert_eq!(name(0, 1), "model.safetensors");
        assert_eq!(name(1, 12), "model-00002-of-00012.safetensors");
    }

    #[test]
    fn sizes() {
        assert_eq!(
            (parse_size("5GB"), parse_size("4GiB"), parse_size("123")),
            (Ok(5_000_000_000), Ok(4 << 30), Ok(123))
        );
        for wrong in ["", "GB", "5 parsecs", "0MB", "99999999999TB"] {
            assert!(parse_size(wrong).unwrap_err().contains("legal: 5GB"), "{wrong}");
        }
    }
}
