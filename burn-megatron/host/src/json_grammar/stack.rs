//! What is expected, the next first: the states of the automaton, which can be compared.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use super::character::Character;
use super::number::Part;

/// What is expected after what is on top of it.
#[derive(Clone, Debug)]
pub(super) struct Stack(Option<Arc<Frame>>);

#[derive(Debug)]
pub(super) struct Frame {
    pub expected: Expected,
    pub below: Stack,
    /// Arrays and objects that are open.
    pub depth: usize,
    hash: u64,
}

/// A number that no text reaches.
pub(super) const NO_LIMIT: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Expected {
    /// So much white space at most.
    Spaces(u8),
    Value(usize),
    /// The rest of one of these texts, from a byte on.
    Rest {
        node: usize,
        from: usize,
        to: usize,
        at: usize,
    },
    /// The rest of `true`, `false` or `null`.
    Word(&'static [u8]),
    /// More of a string: at least and at most so many characters.
    Text {
        least: u32,
        most: u32,
    },
    /// More of what a pattern describes, in this state.
    Pattern {
        node: usize,
        state: u32,
        is_escaped: bool,
    },
    /// More of a character.
    Character(Character),
    Number {
        part: Part,
        is_integer: bool,
        digits: u8,
    },
    /// `]`, or the first item.
    Items(usize),
    /// `,` or `]`: at least and at most so many items more.
    MoreItems {
        node: usize,
        least: u32,
        most: u32,
    },
    /// `}`, or the first key.
    Keys(usize),
    /// A key.
    Key {
        node: usize,
        seen: u128,
    },
    /// The rest of a key.
    KeyText {
        node: usize,
        seen: u128,
        key: KeyText,
    },
    Colon,
    /// `,` or `}`.
    MoreKeys {
        node: usize,
        seen: u128,
    },
}

/// What is written of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct KeyText {
    /// The keys of the schema that begin so, by their order.
    pub from: usize,
    pub to: usize,
    /// So many bytes of them are written.
    pub at: usize,
    /// It may become another key.
    pub is_free: bool,
    /// The last byte was a backslash, and the next is what it escapes.
    pub is_escaped: bool,
    pub within: Option<Character>,
}

/// `most`, one less.
pub(super) fn less(most: u32) -> u32 {
    if most == NO_LIMIT { NO_LIMIT } else { most - 1 }
}

impl Stack {
    /// Nothing is expected.
    pub const EMPTY: Self = Self(None);

    pub fn top(&self) -> Option<&Frame> {
        self.0.as_deref()
    }

    pub fn depth(&self) -> usize {
        self.top().map_or(0, |frame| frame.depth)
    }

    fn hash(&self) -> u64 {
        self.top().map_or(0, |frame| frame.hash)
    }

    /// The same with something before.
    pub fn on(&self, expected: Expected) -> Self {
        use Expected::{Items, Key, KeyText, Keys, MoreItems, MoreKeys};
        let is_open =
            matches!(expected, Items(_) | MoreItems { .. } | Keys(_) | Key { .. } | KeyText { .. } | MoreKeys { .. });
        let mut hasher = Mix(0);
        (&expected, self.hash()).hash(&mut hasher);
        let depth = self.depth() + usize::from(is_open);
        Self(Some(Arc::new(Frame { expected, below: self.clone(), depth, hash: hasher.finish() })))
    }

    /// A state from which tokens of at most `longest` bytes lead as from this one: limits that are farther away are none.
    pub fn near(&self, longest: u32) -> Self {
        let Some(Frame { expected, below, .. }) = self.top() else { return self.clone() };
        let nearer = |least: u32, most: u32| (least.min(longest + 1), if most > longest { NO_LIMIT } else { most });
        match *expected {
            Expected::Character(_) => below.near(longest).on(*expected),
            Expected::Text { least, most } => {
                let (least, most) = nearer(least, most);
                below.on(Expected::Text { least, most })
            }
            Expected::MoreItems { node, least, most } => {
                let (least, most) = nearer(least, most);
                below.on(Expected::MoreItems { node, least, most })
            }
            _ => self.clone(),
        }
    }
}

impl PartialEq for Stack {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(a), Some(b)) => {
                Arc::ptr_eq(a, b) || a.hash == b.hash && a.expected == b.expected && a.below == b.below
            }
            _ => false,
        }
    }
}

impl Eq for Stack {}

/// A hash for what is compared anyway: fast, because every byte of every token makes states.
struct Mix(u64);

impl Hasher for Mix {
    fn write(&mut self, bytes: &[u8]) {
        for part in bytes.chunks(8) {
            let word = part.iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
            self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl Hash for Stack {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash());
    }
}
