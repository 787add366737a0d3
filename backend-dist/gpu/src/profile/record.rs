//! Decoding of CUPTI's activity records. Pure.
//!
//! The fields used here have had the same offsets from CUDA 9 (`CUpti_ActivityKernel4`) to CUDA 13.5
//! (`CUpti_ActivityKernel13`, `CUpti_ActivityMemcpy7`, `CUpti_ActivityMemset5`): newer records only append fields.
//! Offsets are those of `cupti_activity.h`, whose structs are packed.

use super::{Noted, Profile, Source, Span};
use std::collections::HashMap;

/// `CUpti_ActivityKind`.
pub(super) mod kind {
    pub const MEMCPY: u32 = 1;
    pub const MEMSET: u32 = 2;
    pub const KERNEL: u32 = 3;
    pub const DRIVER: u32 = 4;
    pub const RUNTIME: u32 = 5;
    pub const CONCURRENT_KERNEL: u32 = 10;
    pub const MEMCPY_PEER: u32 = 22;
    pub const EXTERNAL_CORRELATION: u32 = 39;
}

/// `CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0`: ids of this crate.
pub(super) const OURS: u32 = 3;

/// Bytes read of the longest record.
pub(super) const LONGEST: usize = 112;

/// The used fields of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// Work on a GPU.
    Ran {
        what: What,
        /// CUDA's index.
        gpu: u32,
        start: u64,
        end: u64,
        /// Number of the call that launched it.
        correlation: u32,
    },
    /// A call was made while an id was pushed.
    Call { correlation: u32, id: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Address of its name, a C string of the library.
    Kernel(usize),
    /// `CUpti_ActivityMemcpyKind` and bytes.
    Copy(u8, u64),
    /// Bytes.
    Fill(u64),
}

/// Decodes a record from its first [`LONGEST`] bytes or all it has; `None` for other kinds and for records that are too
/// short.
pub(super) fn decode(bytes: &[u8]) -> Option<Record> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let ran = |what, gpu, correlation| {
        Some(Record::Ran {
            what,
            gpu: u32_at(gpu)?,
            start: u64_at(16)?,
            end: u64_at(24)?,
            correlation: u32_at(correlation)?,
        })
    };
    match u32_at(0)? {
        kind::KERNEL | kind::CONCURRENT_KERNEL => ran(What::Kernel(u64_at(104)? as usize), 40, 92),
        kind::MEMCPY => ran(What::Copy(*bytes.get(4)?, u64_at(8)?), 32, 44),
        kind::MEMCPY_PEER => ran(What::Copy(*bytes.get(4)?, u64_at(8)?), 32, 60),
        kind::MEMSET => ran(What::Fill(u64_at(8)?), 32, 44),
        kind::EXTERNAL_CORRELATION if u32_at(4)? == OURS => {
            Some(Record::Call { correlation: u32_at(16)?, id: u64_at(8)? })
        }
        _ => None,
    }
}

/// The name of a copy, after `CUpti_ActivityMemcpyKind`.
fn copy_name(kind: u8) -> &'static str {
    match kind {
        1 => "copy from host to GPU",
        2 => "copy from GPU to host",
        8 => "copy on the GPU",
        10 => "copy between GPUs",
        _ => "copy",
    }
}

/// The profile of `window` (start and end on the records' clock) from its records and operations, in any order; `noted`
/// are operations and their ids, `name` reads a kernel's name.
pub(super) fn assemble(
    source: Source,
    window: [u64; 2],
    noted: Vec<(u64, Noted)>,
    records: &[Record],
    name: impl Fn(usize) -> String,
) -> Profile {
    let index: HashMap<u64, usize> = noted.iter().enumerate().map(|(index, (id, _))| (*id, index)).collect();
    let call = |record: &Record| match record {
        Record::Call { correlation, id } => Some((*correlation, *index.get(id)?)),
        Record::Ran { .. } => None,
    };
    let calls: HashMap<u32, usize> = records.iter().filter_map(call).collect();
    let span = |record: &Record| {
        let Record::Ran { what, gpu, start, end, correlation } = record else { return None };
        let (name, bytes) = match what {
            What::Kernel(at) => (name(*at), 0),
            What::Copy(kind, bytes) => (copy_name(*kind).into(), *bytes),
            What::Fill(bytes) => ("fill".into(), *bytes),
        };
        let inside = *start >= window[0] && *end <= window[1] && end > start;
        let operation = calls.get(correlation).copied();
        let span = Span { gpu: *gpu as usize, name, start: *start, end: *end, bytes, operation };
        inside.then_some(span)
    };
    let spans = records.iter().filter_map(span).collect();
    let operations = noted.into_iter().map(|(_, noted)| noted).collect();
    Profile { source, window: window[1] - window[0], operations, spans, dropped: 0 }
}

#[cfg(test)]
mod tests {
    use super::super::{Kind, Operation, Precision};
    use super::*;

    /// A record of `length` bytes with these numbers at these offsets.
    fn bytes(length: usize, u32s: &[(usize, u32)], u64s: &[(usize, u64)]) -> Vec<u8> {
        let mut out = vec![0xee; length];
        u32s.iter().for_each(|(at, value)| out[*at..at + 4].copy_from_slice(&value.to_le_bytes()));
        u64s.iter().for_each(|(at, value)| out[*at..at + 8].copy_from_slice(&value.to_le_bytes()));
        out
    }

    fn kernel(correlation: u32, start: u64, end: u64) -> Vec<u8> {
        // `offsetof` in CUDA 12.8's CUpti_ActivityKernel9: deviceId 40, correlationId 92, name 104; 208 bytes.
        bytes(208, &[(0, 10), (40, 1), (92, correlation)], &[(16, start), (24, end), (104, 0xabcd)])
    }

    #[test]
    fn records_are_read_where_the_header_puts_their_fields() {
        let found = decode(&kernel(77, 1000, 1500)[..LONGEST]).unwrap();
        let ran = |what, gpu| Record::Ran { what, gpu, start: 1000, end: 1500, correlation: 77 };
        assert_eq!(found, ran(What::Kernel(0xabcd), 1));
        let times = [(8, 4096), (16, 1000), (24, 1500)];
        let copy = bytes(96, &[(0, 1), (4, 0xeeee_ee08), (32, 3), (44, 77)], &times);
        assert_eq!(decode(&copy), Some(ran(What::Copy(8, 4096), 3)));
        let peer = bytes(96, &[(0, kind::MEMCPY_PEER), (4, 0xeeee_ee0a), (32, 3), (60, 77)], &times);
        assert_eq!(decode(&peer), Some(ran(What::Copy(10, 4096), 3)));
        let fill = bytes(88, &[(0, 2), (32, 0), (44, 77)], &times);
        assert_eq!(decode(&fill), Some(ran(What::Fill(4096), 0)));
        let call = |owner| bytes(24, &[(0, 39), (4, owner), (16, 77)], &[(8, 1 << 40)]);
        assert_eq!(decode(&call(OURS)), Some(Record::Call { correlation: 77, id: 1 << 40 }));
        assert_eq!(decode(&call(1)), None);
    }

    #[test]
    fn other_and_short_records_are_passed_over() {
        for call in [kind::DRIVER, kind::RUNTIME] {
            assert_eq!(decode(&bytes(40, &[(0, call)], &[])), None);
        }
        assert_eq!(decode(&kernel(1, 2, 3)[..LONGEST - 1]), None);
        assert_eq!(decode(&[10, 0]), None);
    }

    #[test]
    fn kernels_meet_the_operation_that_launched_them() {
        let operation = |name: &'static str| Operation {
            name: name.into(),
            kind: Kind::Gemm,
            precision: Precision::Half,
            flops: 8.0,
            bytes: 2.0,
        };
        let noted = |id, name| (id, Noted { gpu: 1, operation: operation(name) });
        let mut records: Vec<Record> = [kernel(5, 110, 120), kernel(6, 130, 150), kernel(7, 10, 20)]
            .iter()
            .filter_map(|bytes| decode(bytes))
            .collect();
        records.push(Record::Call { correlation: 6, id: 41 });
        // An id from before the window.
        records.push(Record::Call { correlation: 5, id: 3 });
        let profile =
            assemble(Source::Cupti { version: 26 }, [100, 200], vec![noted(40, "a"), noted(41, "b")], &records, |at| {
                format!("kernel at {at:x}")
            });
        assert_eq!((profile.window, profile.operations.len(), profile.spans.len()), (100, 2, 2));
        assert_eq!(profile.spans.iter().map(|span| span.operation).collect::<Vec<_>>(), [None, Some(1)]);
        assert_eq!((profile.spans[1].name.as_str(), profile.spans[1].gpu), ("kernel at abcd", 1));
    }
}
