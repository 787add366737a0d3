//! Damaged copies of files: what a property test of a reader tries.

use proptest::prelude::*;
use proptest::test_runner::Config;

/// So many cases, or as many as the environment variable `BURN_MEGATRON_FUZZ_CASES` says.
pub fn cases(default: u32) -> Config {
    let asked = std::env::var("BURN_MEGATRON_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok());
    Config::with_cases(asked.unwrap_or(default))
}

/// One change of a file; positions are shares of its length.
#[derive(Clone, Debug)]
pub enum Damage {
    Byte(f64, u8),
    Number(f64, u64),
    Truncate(f64),
    Append(Vec<u8>),
    Repeat(f64, usize),
}

/// Numbers that readers overflow at.
const NUMBERS: [u64; 10] =
    [0, 1, 0x7f, 0x7fff_ffff, 0xffff_ffff, 1 << 32, 1 << 40, i64::MAX as u64, u64::MAX - 7, u64::MAX];

pub fn damage() -> impl Strategy<Value = Vec<Damage>> {
    let share = 0.0..1.0f64;
    let number = prop_oneof![prop::sample::select(NUMBERS.to_vec()), any::<u64>()];
    // The beginning of a file says most about the rest.
    let position = prop_oneof![share.clone(), 0.0..0.02f64];
    let one = prop_oneof![
        6 => (position.clone(), any::<u8>()).prop_map(|(at, byte)| Damage::Byte(at, byte)),
        4 => (position, number).prop_map(|(at, number)| Damage::Number(at, number)),
        1 => share.clone().prop_map(Damage::Truncate),
        1 => prop::collection::vec(any::<u8>(), 1..40).prop_map(Damage::Append),
        1 => (share, 1..64usize).prop_map(|(at, length)| Damage::Repeat(at, length)),
    ];
    prop::collection::vec(one, 1..4)
}

pub fn apply(bytes: &mut Vec<u8>, damage: &[Damage]) {
    for change in damage {
        let length = bytes.len();
        let at = |share: f64| ((share * length as f64) as usize).min(length.saturating_sub(1));
        match change {
            Damage::Append(more) => bytes.extend(more),
            _ if bytes.is_empty() => {}
            Damage::Byte(share, byte) => bytes[at(*share)] = *byte,
            Damage::Number(share, number) => {
                let start = at(*share);
                let end = (start + 8).min(length);
                bytes[start..end].copy_from_slice(&number.to_le_bytes()[..end - start]);
            }
            Damage::Truncate(share) => bytes.truncate(at(*share)),
            Damage::Repeat(share, count) => {
                let start = at(*share);
                let again = bytes[start..(start + count).min(length)].to_vec();
                bytes.splice(start..start, again);
            }
        }
    }
}
