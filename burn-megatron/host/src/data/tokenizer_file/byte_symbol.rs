//! The characters that byte-level tokenizers write for bytes.

/// GPT-2's printable stand-in for a byte: itself where it is printable Latin-1, else the next free code point from 256.
pub(in crate::data) fn byte_symbol(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match printable(byte) {
        true => char::from(byte),
        false => {
            let before = (0..byte).filter(|&other| !printable(other)).count() as u32;
            char::from_u32(256 + before).expect("a Latin character")
        }
    }
}
