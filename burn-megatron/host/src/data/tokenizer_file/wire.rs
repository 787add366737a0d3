//! The encoding of Protocol Buffers (<https://protobuf.dev/programming-guides/encoding/>), as much as a SentencePiece model
//! needs: a dozen fields of four messages. Code that a compiler of schemas makes would be several times as long.

/// A field of a message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Field<'a> {
    /// An integer, a truth value, or one of an enumeration.
    Varint(u64),
    /// Four bytes: a float.
    Fixed32([u8; 4]),
    /// Eight bytes.
    Fixed64,
    /// A string, bytes, or a message.
    Bytes(&'a [u8]),
}

/// The fields of a message with their numbers, in order.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub fn new(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = *self.take(1)?.first()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let key = self.varint()?;
        let field = match key & 7 {
            0 => Field::Varint(self.varint()?),
            1 => self.take(8).map(|_| Field::Fixed64)?,
            2 => {
                let length = usize::try_from(self.varint()?).ok()?;
                Field::Bytes(self.take(length)?)
            }
            5 => Field::Fixed32(self.take(4)?.try_into().ok()?),
            _ => return None,
        };
        Some((key >> 3, field))
    }
}

/// `None` where the bytes are no message.
impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, Field<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.rest = &[];
        }
        Some(field)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_and_broken_ones_end_the_message() {
        let message = [0x08, 0x96, 0x01, 0x12, 2, b'a', b'b', 0x1d, 0, 0, 0x80, 0x3f];
        let read: Vec<_> = Fields::new(&message).collect();
        let one = 1f32.to_le_bytes();
        let expected = [(1, Field::Varint(150)), (2, Field::Bytes(b"ab")), (3, Field::Fixed32(one))];
        assert_eq!(read, expected.map(Some));
        for end in [1, 2, 4, 6, 11] {
            assert_eq!(Fields::new(&message[..end]).last(), Some(None), "{end}");
        }
        assert_eq!(Fields::new(&[0x0b]).last(), Some(None), "a group");
        assert_eq!(Fields::new(&[0xff; 20]).last(), Some(None), "a number of more than 64 bits");
    }
}
