//! The keys of an object.

use super::character::Character;
use super::machine::{narrow, spaced};
use super::stack::{Expected, Frame, KeyText, Stack};
use super::{JsonGrammar, Key, Node};

impl JsonGrammar {
    /// A byte where keys are expected.
    pub(super) fn push_key(&self, frame: &Frame, byte: u8, next: &mut Vec<Stack>) {
        let Frame { expected, below, depth, .. } = frame;
        let mut go = |stack: Stack| next.push(stack);
        match *expected {
            Expected::Keys(node) if byte == b'}' && self.has_all(node, 0) => go(below.clone()),
            Expected::Keys(node) | Expected::Key { node, .. } if byte == b'"' => {
                let seen = if let Expected::Key { seen, .. } = *expected { seen } else { 0 };
                let Node::Object { keys, .. } = &self.nodes[node] else { return };
                let is_free = self.has_others(node, *depth);
                let key = KeyText { from: 0, to: keys.len(), at: 0, is_free, is_escaped: false, within: None };
                if self.has_more(node, seen, *depth) {
                    go(below.on(Expected::KeyText { node, seen, key }));
                }
            }
            Expected::KeyText { node, seen, key } if byte == b'"' && !key.is_escaped => {
                let Node::Object { keys, others, .. } = &self.nodes[node] else { return };
                let known = (key.from..key.to).next().filter(|at| keys[*at].text.len() == key.at);
                let (value, seen) = match (known, others) {
                    (Some(at), _) if !self.is_left(&keys[at], at, seen, *depth) => return,
                    (Some(at), _) => (keys[at].value, seen | 1 << at),
                    (None, Some(others)) if key.is_free && key.within.is_none() => (*others, seen),
                    (None, _) => return,
                };
                let more = spaced(below, Expected::MoreKeys { node, seen });
                go(spaced(&spaced(&more, Expected::Value(value)), Expected::Colon));
            }
            Expected::KeyText { node, seen, key } => {
                if let Some(key) = self.key(node, seen, key, byte, *depth) {
                    go(below.on(Expected::KeyText { node, seen, key }));
                }
            }
            Expected::MoreKeys { node, seen } => match byte {
                b'}' if self.has_all(node, seen) => go(below.clone()),
                b',' if self.has_more(node, seen, *depth) => go(spaced(below, Expected::Key { node, seen })),
                _ => {}
            },
            _ => {}
        }
    }

    /// A key with one more byte. Other keys have no escapes, so that none is a known one in disguise.
    fn key(&self, node: usize, seen: u128, key: KeyText, byte: u8, depth: usize) -> Option<KeyText> {
        let Node::Object { keys, .. } = &self.nodes[node] else { return None };
        let rest = match key.within {
            Some(within) => within.next(byte),
            None => Character::first(byte),
        };
        let is_free = key.is_free && rest.is_some();
        let (from, to) = narrow(keys, (key.from, key.to, key.at), byte, |key| &key.text);
        let is_known = (from..to).any(|at| self.is_left(&keys[at], at, seen, depth));
        if !is_free && !is_known {
            return None;
        }
        // All other keys are in the same state.
        let (from, to, at) = if from < to { (from, to, key.at + 1) } else { (0, 0, 0) };
        let is_escaped = byte == b'\\' && !key.is_escaped;
        Some(KeyText { from, to, at, is_free, is_escaped, within: rest.flatten().filter(|_| is_free) })
    }

    /// Whether a known key may still be written.
    fn is_left(&self, key: &Key, at: usize, seen: u128, depth: usize) -> bool {
        seen >> at & 1 == 0 && self.fits(key.value, depth)
    }

    fn has_others(&self, node: usize, depth: usize) -> bool {
        matches!(self.nodes[node], Node::Object { others: Some(others), .. } if self.fits(others, depth))
    }

    fn has_all(&self, node: usize, seen: u128) -> bool {
        matches!(self.nodes[node], Node::Object { needed, .. } if needed & !seen == 0)
    }

    fn has_more(&self, node: usize, seen: u128, depth: usize) -> bool {
        let Node::Object { keys, .. } = &self.nodes[node] else { return false };
        let is_left = |(at, key)| self.is_left(key, at, seen, depth);
        self.has_others(node, depth) || keys.iter().enumerate().any(is_left)
    }
}
