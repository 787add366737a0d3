//! The bytes of a character in a JSON string: UTF-8, or an escape.

/// Within a character: what must come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Character {
    /// So many bytes more, the next from `low` to `high`.
    Bytes { left: u8, low: u8, high: u8 },
    /// What follows a backslash.
    Escape,
    /// The first of four hexadecimal digits.
    FirstDigit,
    /// The second one after a `d`: a surrogate, or not.
    AfterD,
    /// So many digits.
    Digits(u8),
    /// So many digits of a high surrogate.
    High(u8),
    /// The low surrogate, from this byte of `\uDC00` on.
    Low(u8),
}

/// What there is behind a byte: more of a character, or None at its end.
pub(super) type Rest = Option<Character>;

impl Character {
    /// The first byte of a character that is neither a quote nor an escape; None if it cannot be one.
    pub fn first(byte: u8) -> Option<Rest> {
        // No surrogates, nothing behind U+10FFFF, nothing longer than need be (Unicode, table 3-7).
        let (left, low, high) = match byte {
            b'"' | b'\\' => return None,
            0x20..=0x7f => return Some(None),
            0xc2..=0xdf => (1, 0x80, 0xbf),
            0xe0 => (2, 0xa0, 0xbf),
            0xed => (2, 0x80, 0x9f),
            0xe1..=0xef => (2, 0x80, 0xbf),
            0xf0 => (3, 0x90, 0xbf),
            0xf1..=0xf3 => (3, 0x80, 0xbf),
            0xf4 => (3, 0x80, 0x8f),
            _ => return None,
        };
        Some(Some(Self::Bytes { left, low, high }))
    }

    /// Takes a byte; None if it must not come.
    pub fn next(self, byte: u8) -> Option<Rest> {
        let is_digit = byte.is_ascii_hexdigit();
        Some(match self {
            Self::Bytes { left, low, high } if (low..=high).contains(&byte) => {
                (left > 1).then_some(Self::Bytes { left: left - 1, low: 0x80, high: 0xbf })
            }
            Self::Escape => match byte {
                b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => None,
                b'u' => Some(Self::FirstDigit),
                _ => return None,
            },
            Self::FirstDigit if matches!(byte, b'd' | b'D') => Some(Self::AfterD),
            Self::FirstDigit if is_digit => Some(Self::Digits(3)),
            Self::AfterD => match byte {
                b'0'..=b'7' => Some(Self::Digits(2)),
                b'8' | b'9' | b'a' | b'b' | b'A' | b'B' => Some(Self::High(2)),
                // A low surrogate alone.
                _ => return None,
            },
            Self::Digits(left) if is_digit => (left > 1).then_some(Self::Digits(left - 1)),
            Self::High(left) if is_digit => Some(if left > 1 { Self::High(left - 1) } else { Self::Low(0) }),
            Self::Low(0) if byte == b'\\' => Some(Self::Low(1)),
            Self::Low(1) if byte == b'u' => Some(Self::Low(2)),
            Self::Low(2) if matches!(byte, b'd' | b'D') => Some(Self::Low(3)),
            Self::Low(3) if matches!(byte, b'c'..=b'f' | b'C'..=b'F') => Some(Self::Digits(2)),
            _ => return None,
        })
    }
}
