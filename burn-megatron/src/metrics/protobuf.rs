//! Protobuf's wire format (<https://protobuf.dev/programming-guides/encoding>), as far as log files need it.

/// Fields of a protobuf message in the order in which they are added.
#[derive(Default)]
pub(super) struct Message(pub Vec<u8>);

impl Message {
    pub fn varint(&mut self, field: u64, value: u64) -> &mut Self {
        self.key(field, 0);
        self.number(value);
        self
    }

    pub fn double(&mut self, field: u64, value: f64) -> &mut Self {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub fn bytes(&mut self, field: u64, value: &[u8]) -> &mut Self {
        self.key(field, 2);
        self.number(value.len() as u64);
        self.0.extend(value);
        self
    }

    pub fn float(&mut self, field: u64, value: f32) -> &mut Self {
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
