//! The bytes of an event: protobuf messages in TFRecord frames.
//!
//! Sources: `tensorflow/core/util/event.proto` (Event, SessionLog), `tensorflow/core/framework/summary.proto`
//! (Summary), `tensorflow/core/lib/io/record_writer.h` (frames); the wire format is protobuf's.

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

/// Fields of a protobuf message in the order in which they are added.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, field: u64, value: u64) -> &mut Self {
        self.key(field, 0);
        self.number(value);
        self
    }

    fn double(&mut self, field: u64, value: f64) -> &mut Self {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(&mut self, field: u64, value: &[u8]) -> &mut Self {
        self.key(field, 2);
        self.number(value.len() as u64);
        self.0.extend(value);
        self
    }

    fn float(&mut self, field: u64, value: f32) -> &mut Self {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn key(&mut self, field: u64, wire_type: u64) {
        self.number(field << 3 | wire_type);
    }

    /// Seven bits at a time, the lowest first; the highest bit of a byte says that more follow.
    fn number(&mut self, mut value: u64) {
        while value > 0x7f {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
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
