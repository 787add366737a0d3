//! The bytes of a `.wandb` file: protobuf messages in the frames of LevelDB's log.
//!
//! Sources: `wandb/proto/wandb_internal.proto` (messages), `core/internal/transactionlog` of wandb 0.31 (file header) and
//! `leveldb/doc/log_format.md` (frames), whose checksum is CRC-32 here.

use std::time::Duration;

use crate::metrics::protobuf::Message;

/// `:W&B`, a magic number and the version 0.
pub(super) const HEADER: [u8; 7] = [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0];

const BLOCK: usize = 32_768;
/// Checksum, length and kind of a fragment.
const FRAGMENT: usize = 7;

/// What a run begins with.
pub(super) struct Start<'a> {
    pub id: &'a str,
    pub name: &'a str,
    /// Keys and JSON values.
    pub config: &'a [(String, String)],
    pub time: Duration,
}

/// An entry of the file; `items` are names and JSON values.
pub(super) enum Record<'a> {
    Header,
    Run(Start<'a>),
    Summary(&'a [(String, String)]),
    History { step: u64, items: &'a [(String, String)] },
    Exit { code: u64, runtime: u64 },
}

impl Record<'_> {
    /// Its field of `Record`, and its message.
    fn message(&self) -> (u64, Message) {
        let mut message = Message::default();
        let field = match self {
            Self::Header => {
                let mut version = Message::default();
                version.bytes(1, concat!("burn-megatron ", env!("CARGO_PKG_VERSION")).as_bytes()).bytes(2, b"0.70.0");
                message.bytes(1, &version.0);
                21
            }
            Self::Run(start) => {
                let mut config = Message::default();
                for (key, value) in start.config {
                    config.bytes(1, &Message::default().bytes(1, key.as_bytes()).bytes(16, value.as_bytes()).0);
                }
                let mut time = Message::default();
                time.varint(1, start.time.as_secs()).varint(2, u64::from(start.time.subsec_nanos()));
                message.bytes(1, start.id.as_bytes()).bytes(3, b"burn-megatron").bytes(4, &config.0);
                message.bytes(6, start.name.as_bytes()).bytes(8, start.name.as_bytes()).bytes(17, &time.0);
                17
            }
            Self::Summary(values) => {
                items(&mut message, values);
                3
            }
            Self::History { step, items: values } => {
                items(&mut message, values);
                message.bytes(2, &Message::default().varint(1, *step).0);
                2
            }
            Self::Exit { code, runtime } => {
                message.varint(1, *code).varint(2, *runtime);
                18
            }
        };
        (field, message)
    }
}

/// `HistoryItem` and `SummaryItem`, which have the same fields. A name may have slashes, so it is the only part of a nested
/// key.
fn items(message: &mut Message, values: &[(String, String)]) {
    for (name, value) in values {
        message.bytes(1, &Message::default().bytes(2, name.as_bytes()).bytes(16, value.as_bytes()).0);
    }
}

/// What is in the file so far.
pub(super) struct Log {
    bytes: usize,
    records: u64,
}

impl Default for Log {
    /// With the header.
    fn default() -> Self {
        Self { bytes: HEADER.len(), records: 0 }
    }
}

impl Log {
    /// The bytes of the next record: as many fragments as blocks that it reaches into.
    pub fn frame(&mut self, record: &Record) -> Vec<u8> {
        self.records += 1;
        let (field, message) = record.message();
        let mut whole = Message::default();
        whole.varint(1, self.records).bytes(field, &message.0);
        let (mut rest, mut first, mut out) = (whole.0.as_slice(), true, Vec::new());
        loop {
            let left = BLOCK - (self.bytes + out.len()) % BLOCK;
            if left < FRAGMENT {
                out.resize(out.len() + left, 0);
                continue;
            }
            let (now, later) = rest.split_at(rest.len().min(left - FRAGMENT));
            // Full, first, middle and last.
            let kind = match (first, later.is_empty()) {
                (true, true) => 1,
                (true, false) => 2,
                (false, false) => 3,
                (false, true) => 4,
            };
            let mut checksum = flate2::Crc::new();
            checksum.update(&[kind]);
            checksum.update(now);
            out.extend(checksum.sum().to_le_bytes());
            out.extend((now.len() as u16).to_le_bytes());
            out.push(kind);
            out.extend(now);
            (rest, first) = (later, false);
            if rest.is_empty() {
                break;
            }
        }
        self.bytes += out.len();
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of a file, each fragment's checksum checked.
    fn read(bytes: &[u8]) -> Vec<Vec<u8>> {
        let (mut at, mut message, mut all) = (HEADER.len(), Vec::new(), Vec::new());
        while at < bytes.len() {
            let left = BLOCK - at % BLOCK;
            if left < FRAGMENT {
                at += left;
                continue;
            }
            let length = usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]]));
            let data = &bytes[at + FRAGMENT..at + FRAGMENT + length];
            let mut checksum = flate2::Crc::new();
            checksum.update(&bytes[at + 6..at + FRAGMENT + length]);
            assert_eq!(checksum.sum().to_le_bytes(), bytes[at..at + 4]);
            message.extend(data);
            if [1, 4].contains(&bytes[at + 6]) {
                all.push(std::mem::take(&mut message));
            }
            at += FRAGMENT + length;
        }
        assert!(message.is_empty());
        all
    }

    #[test]
    fn records_cross_blocks_as_leveldbs_do() {
        for length in [1, BLOCK - 40, BLOCK - 30, 3 * BLOCK] {
            let (mut log, mut file) = (Log::default(), HEADER.to_vec());
            let items = [("text".to_string(), "x".repeat(length))];
            for _ in 0..5 {
                file.extend(log.frame(&Record::Summary(&items)));
            }
            let messages = read(&file);
            assert_eq!(messages.len(), 5);
            for (index, message) in messages.iter().enumerate() {
                assert_eq!(message[..3], [1 << 3, index as u8 + 1, 3 << 3 | 2], "number and field of the record");
                assert!(message.len() > length);
            }
        }
    }
}
