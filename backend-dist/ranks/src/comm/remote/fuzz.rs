//! Bytes from a connection never panic, and never take more memory than they have a right to.

use super::frame::Frame;
use super::gate::{End, Gate, Nonce};
use super::introduction::{Greeting, HOST, MAGIC, Stranger};
use crate::process::ProcessWorld;
use proptest::prelude::*;

/// Cases of a fuzz test; the same variable for all of the project.
pub(crate) fn cases() -> ProptestConfig {
    let cases = std::env::var("BURN_MEGATRON_FUZZ_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(256);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

/// Beginnings of frames that must be refused, or wait for more.
const FRAMES: [&[u8]; 10] = [
    b"",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\0\0\0\0\0\0\0\0",
    b"\x01\0\0\0\0\0\0\0\xc1",
    b"\x04\0\0\0\0\0\0\0\xdd\xff\xff\xff",
    b"\x05\0\0\0\0\0\0\0\xdd\xff\xff\xff\xff",
    b"\x06\0\0\0\0\0\0\0\xc6\xff\xff\xff\xff\0",
    b"\x01\0\0\0\xff\xff\0\0\xc0",
    b"\x01\0\0\0\x01\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff\xc0abc",
    b"\x0a\0\0\0\0\0\0\0\xa9Heartbeet",
];

/// Introductions that must be refused.
const INTRODUCTIONS: [&[u8]; 6] = [
    b"\xc0",
    b"\x95\xff\x02\xa1h\x90\xc0",
    b"\x95\x01\x02\xa1h\xdd\xff\xff\xff\xff",
    b"\x95\x01\x02\xdb\xff\xff\xff\xffh",
    b"\x95\x01\x02\xa2\xff\xfe\x90\xc0",
    b"\x93\x01\x02\xa1h",
];

const NONCE: Nonce = [3; 32];

fn gate() -> Gate {
    Gate::of(&ProcessWorld::on_one_host(0, 2, 29500))
}

fn parse(bytes: &[u8]) -> Greeting {
    Greeting::parse(bytes, &gate(), &NONCE)
}

/// An introduction of this text, with the proof that belongs to it.
fn introduced(text: &[u8]) -> Vec<u8> {
    let proof = gate().proof(End::Caller, [&NONCE, &[4; 32]], text);
    [&MAGIC[..], &gate().token, &[4; 32], &proof, &(text.len() as u32).to_le_bytes(), text].concat()
}

#[test]
fn known_bad_bytes_are_refused() {
    for bytes in FRAMES {
        assert!(Frame::read(&mut &bytes[..]).is_err(), "{bytes:?}");
    }
    for text in INTRODUCTIONS {
        let greeting = parse(&introduced(text));
        assert!(matches!(greeting, Greeting::Stranger(_)), "{text:?}: {greeting:?}");
    }
}

/// Random bytes, or those of something valid with some changed and the rest left out.
fn damaged(valid: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let changes = proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8);
    let changed = (changes, any::<prop::sample::Index>()).prop_map(move |(changes, end)| {
        let mut bytes = valid.clone();
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(end.index(bytes.len() + 1));
        bytes
    });
    prop_oneof![proptest::collection::vec(any::<u8>(), 0..256), changed]
}

fn frame() -> Vec<u8> {
    let record = crate::comm::OpRecord {
        name: "barrier".into(),
        payload: "F32 [2]".into(),
        group: "dp[0, 1]".into(),
        sequence: 3,
    };
    let op = super::OpKey { group: record.group.clone(), sequence: 3 };
    let contributions = vec![super::Contribution { member: 1, rank: 1, record }];
    let head = super::Head::Contribute { op, processes: vec![0, 1], contributions };
    let mut bytes = Vec::new();
    Frame { head, blobs: vec![vec![1, 2, 3].into()] }.write(&mut bytes).unwrap();
    bytes
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn any_bytes_are_a_frame_or_an_error(bytes in damaged(frame())) {
        if let Ok(frame) = Frame::read(&mut &bytes[..]) {
            prop_assert!(frame.blobs.iter().map(|blob| blob.len()).sum::<usize>() <= bytes.len());
        }
    }

    #[test]
    fn any_bytes_are_an_introduction_or_a_strangers(
        bytes in damaged(introduced(b"\x95\x01\x02\xa4host\x91\x92\xa2lr\xa11\xc0")),
    ) {
        let whole = parse(&bytes);
        if let Greeting::Process(introduction, _) = &whole {
            prop_assert!(!introduction.host.contains(char::is_control));
            prop_assert!(introduction.host.chars().count() <= 10 * HOST + 1);
        }
        // What has been refused is not let in because of what follows.
        for end in 0..bytes.len() {
            match parse(&bytes[..end]) {
                // Then the rest is more than an introduction.
                Greeting::Process(..) => prop_assert_eq!(&whole, &Greeting::Stranger(Stranger::Introduction)),
                Greeting::Stranger(_) => prop_assert!(!matches!(whole, Greeting::Process(..))),
                Greeting::Incomplete => {}
            }
        }
    }
}
