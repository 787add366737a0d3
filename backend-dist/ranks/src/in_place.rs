//! Legal overlaps of a collective's buffers.

/// Address and length of a buffer, in bytes.
pub(crate) type Span = (usize, usize);

/// Whether member `rank` may communicate from `source` to `target`: the shorter buffer is shard `rank` of the longer
/// one, equally long ones are the same, or they do not overlap.
pub(crate) fn is_in_place_or_apart(source: Span, target: Span, rank: usize) -> bool {
    let (long, short) = if source.1 >= target.1 { (source, target) } else { (target, source) };
    let offset = if long.1 == short.1 { 0 } else { rank * short.1 };
    let is_in_place = short.0 == long.0 + offset;
    let is_apart = source.0 + source.1 <= target.0 || target.0 + target.1 <= source.0;
    is_in_place || is_apart
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_where_nccl_expects_them() {
        let whole = (4096, 1024);
        for rank in 0..4 {
            let part = (4096 + rank * 256, 256);
            for other in 0..4 {
                assert_eq!(is_in_place_or_apart(whole, part, other), rank == other);
                assert_eq!(is_in_place_or_apart(part, whole, other), rank == other);
            }
        }
    }

    #[test]
    fn buffers_may_touch_but_not_overlap() {
        assert!(is_in_place_or_apart((0, 1024), (1024, 256), 1));
        assert!(is_in_place_or_apart((1024, 256), (0, 1024), 3));
        assert!(!is_in_place_or_apart((0, 1024), (1023, 256), 1));
        assert!(is_in_place_or_apart((512, 64), (512, 64), 3));
        assert!(!is_in_place_or_apart((512, 64), (544, 64), 0));
    }
}
