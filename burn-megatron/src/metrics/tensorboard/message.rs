//! The bytes of an event: protobuf messages in TFRecord frames.
//!
//! Sources: `tensorflow/core/util/event.proto` (Event, SessionLog), `tensorflow/core/framework/summary.proto`
//! (Summary), `tensorflow/core/lib/io/record_writer.h` (frames).

use crate::metrics::protobuf::Message;

/// One event.
pub(super) enum Event<'a> {
    /// The first of every file.
    FileVersion,
    /// A run begins at the event's step: what other files say of this step and later ones is void.
    SessionStart,
    /// Names and values.
    Scalars(&'a [(String, f64)]),
}

const FILE_VERSION: &str = "brain.Event:2";

/// `SessionLog.SessionStatus.START`.
const START: u64 = 1;

impl Event<'_> {
    /// The message, at a time in seconds since 1970.
    pub fn encode(&self, time: f64, step: u64) -> Vec<u8> {
        let mut event = Message::default();
        event.double(1, time).varint(2, step);
        match self {
            Event::FileVersion => event.bytes(3, FILE_VERSION.as_bytes()),
            Event::SessionStart => event.bytes(7, &Message::default().varint(1, START).0),
            Event::Scalars(values) => {
                let mut summary = Message::default();
                for (tag, value) in *values {
                    summary.bytes(1, &Message::default().bytes(1, tag.as_bytes()).float(2, *value as f32).0);
                }
                event.bytes(5, &summary.0)
            }
        };
        event.0
    }
}

/// The message in its frame: length, checksum of the length, message, checksum of the message.
pub(super) fn record(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    [&length[..], &checksum(&length), message, &checksum(message)].concat()
}

/// CRC-32C, rotated and shifted: a checksum of data that holds its own checksum would be weak.
fn checksum(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}
