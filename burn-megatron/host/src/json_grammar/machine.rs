//! The automaton: from what is expected and a byte to what is expected then.

use super::character::Character;
use super::number::Part;
use super::pattern::Pattern;
use super::stack::{Expected, Frame, Stack, less};
use super::{ANY_ARRAY, ANY_OBJECT, JsonGrammar, MOST_DEPTH, Node};

/// White space in one place: a line break, and so much else.
const MOST_SPACES: u8 = 24;
/// Digits of a number in one place: a whole number fits into 64 bits.
const MOST_DIGITS: u8 = 18;
/// Digits of an exponent: the number is finite in 64 bits.
const MOST_EXPONENT: u8 = 2;

/// White space and then `expected`.
pub(super) fn spaced(below: &Stack, expected: Expected) -> Stack {
    below.on(expected).on(Expected::Spaces(MOST_SPACES))
}

/// What follows the first byte of a number, if it is one.
fn number(below: &Stack, byte: u8, is_integer: bool) -> Option<Stack> {
    Some(below.on(Expected::Number { part: Part::first(byte)?, is_integer, digits: 1 }))
}

impl JsonGrammar {
    pub(super) fn start(&self) -> Stack {
        Stack::EMPTY.on(Expected::Value(self.root))
    }

    /// Whether nothing more must come.
    pub(super) fn may_end(&self, stack: &Stack) -> bool {
        match stack.top() {
            None => true,
            Some(Frame { expected: Expected::Number { part, .. }, below, .. }) => {
                part.may_end() && below.top().is_none()
            }
            Some(Frame { expected: Expected::Pattern { node, state, .. }, below, .. }) => match &self.nodes[*node] {
                Node::Pattern { pattern, is_string } => !is_string && pattern.may_end(*state) && below.top().is_none(),
                _ => false,
            },
            Some(_) => false,
        }
    }

    /// Adds to `next` what is expected when a byte has come where `stack` was.
    pub(super) fn push(&self, stack: &Stack, byte: u8, next: &mut Vec<Stack>) {
        let Some(frame) = stack.top() else { return };
        let below = &frame.below;
        match frame.expected {
            Expected::Spaces(left) => match byte {
                b' ' | b'\t' if left > 0 => next.push(below.on(Expected::Spaces(left - 1))),
                // Only first, so that a model that is at a loss does not write line after line.
                b'\n' if left == MOST_SPACES => next.push(below.on(Expected::Spaces(left - 1))),
                _ => self.push(below, byte, next),
            },
            Expected::Value(node) => self.begin(node, below, byte, next),
            Expected::Rest { node, from, to, at } => self.rest(node, (from, to, at), below, byte, next),
            Expected::Word([first, rest @ ..]) if *first == byte => {
                next.push(if rest.is_empty() { below.clone() } else { below.on(Expected::Word(rest)) });
            }
            Expected::Word(_) => {}
            Expected::Text { least, most } => {
                if byte == b'"' {
                    next.extend((least == 0).then(|| below.clone()));
                    return;
                }
                if most == 0 {
                    return;
                }
                let more = Expected::Text { least: least.saturating_sub(1), most: less(most) };
                let more = if more == frame.expected { stack.clone() } else { below.on(more) };
                let rest = if byte == b'\\' { Some(Some(Character::Escape)) } else { Character::first(byte) };
                next.extend(rest.map(|rest| rest.map_or(more.clone(), |rest| more.on(Expected::Character(rest)))));
            }
            Expected::Pattern { node, state, is_escaped } => match self.nodes[node] {
                Node::Pattern { is_string: true, .. } => self.push_string((node, state, is_escaped), below, byte, next),
                _ => self.push_number((node, state), below, byte, next),
            },
            Expected::Character(character) => {
                let rest = character.next(byte);
                next.extend(rest.map(|rest| rest.map_or(below.clone(), |rest| below.on(Expected::Character(rest)))));
            }
            Expected::Number { part, is_integer, digits } => match part.next(byte, is_integer) {
                Some(same) if same == part && digits >= most_digits(part) => {}
                Some(then) => {
                    let digits = if then == part { digits + 1 } else { 1 };
                    next.push(below.on(Expected::Number { part: then, is_integer, digits }));
                }
                None if part.may_end() => self.push(below, byte, next),
                None => {}
            },
            Expected::Items(node) => {
                let Node::Array { items, min, max } = self.nodes[node] else { return };
                match byte {
                    b']' => next.extend((min == 0).then(|| below.clone())),
                    _ if max > 0 => {
                        let (least, most) = (min.saturating_sub(1), less(max));
                        let more = spaced(below, Expected::MoreItems { node, least, most });
                        self.begin(items, &more, byte, next);
                    }
                    _ => {}
                }
            }
            Expected::MoreItems { node, least, most } => {
                let Node::Array { items, .. } = self.nodes[node] else { return };
                match byte {
                    b']' if least == 0 => next.push(below.clone()),
                    b',' if most > 0 => {
                        let (least, most) = (least.saturating_sub(1), less(most));
                        let more = spaced(below, Expected::MoreItems { node, least, most });
                        next.push(spaced(&more, Expected::Value(items)));
                    }
                    _ => {}
                }
            }
            Expected::Colon => next.extend((byte == b':').then(|| below.clone())),
            Expected::Keys(_) | Expected::Key { .. } | Expected::KeyText { .. } | Expected::MoreKeys { .. } => {
                self.push_key(frame, byte, next)
            }
        }
    }

    /// A byte of one of some texts, which are in order.
    fn rest(&self, node: usize, (from, to, at): (usize, usize, usize), below: &Stack, byte: u8, next: &mut Vec<Stack>) {
        let Node::Texts(texts) = &self.nodes[node] else { return };
        let (mut from, to) = narrow(texts, (from, to, at), byte, |text| text);
        if from < to && texts[from].len() == at + 1 {
            next.push(below.clone());
            from += 1;
        }
        if from < to {
            next.push(below.on(Expected::Rest { node, from, to, at: at + 1 }));
        }
    }

    /// The first byte of a value, if there is a depth left for it.
    fn begin(&self, node: usize, below: &Stack, byte: u8, next: &mut Vec<Stack>) {
        let all = match &self.nodes[node] {
            Node::Choice(all) => all.as_slice(),
            _ => std::slice::from_ref(&node),
        };
        for node in all.iter().filter(|node| self.fits(**node, below.depth())) {
            self.begin_one(*node, below, byte, next);
        }
    }

    /// Whether a value has a text in so many arrays and objects.
    pub(super) fn fits(&self, node: usize, depth: usize) -> bool {
        depth + self.heights[node] <= MOST_DEPTH
    }

    fn begin_one(&self, node: usize, below: &Stack, byte: u8, next: &mut Vec<Stack>) {
        let text = |least, most| below.on(Expected::Text { least, most });
        match &self.nodes[node] {
            Node::Texts(texts) => self.rest(node, (0, texts.len(), 0), below, byte, next),
            Node::Text { min, max } if byte == b'"' => next.push(text(*min, *max)),
            Node::Number { is_integer } => next.extend(number(below, byte, *is_integer)),
            Node::Pattern { is_string: true, .. } => {
                let on = || below.on(Expected::Pattern { node, state: Pattern::START, is_escaped: false });
                next.extend((byte == b'"').then(on));
            }
            // Its first byte is never behind it.
            Node::Pattern { pattern, .. } if pattern.next(Pattern::START, byte).is_some() => {
                self.push_number((node, Pattern::START), below, byte, next);
            }
            Node::Array { .. } if byte == b'[' => next.push(spaced(below, Expected::Items(node))),
            Node::Object { .. } if byte == b'{' => next.push(spaced(below, Expected::Keys(node))),
            Node::Any => match byte {
                b'{' => self.begin(ANY_OBJECT, below, byte, next),
                b'[' => self.begin(ANY_ARRAY, below, byte, next),
                b'"' => next.push(text(0, super::stack::NO_LIMIT)),
                b't' => next.push(below.on(Expected::Word(b"rue"))),
                b'f' => next.push(below.on(Expected::Word(b"alse"))),
                b'n' => next.push(below.on(Expected::Word(b"ull"))),
                _ => next.extend(number(below, byte, false)),
            },
            _ => {}
        }
    }
}

/// The part of sorted texts that have this byte at `at`; those `from..to` are the same before.
pub(super) fn narrow<T>(
    all: &[T],
    (from, to, at): (usize, usize, usize),
    byte: u8,
    text: impl Fn(&T) -> &[u8],
) -> (usize, usize) {
    let before = |is: fn(Option<&u8>, Option<&u8>) -> bool| {
        from + all[from..to].partition_point(|each| is(text(each).get(at), Some(&byte)))
    };
    (before(|a, b| a < b), before(|a, b| a <= b))
}

fn most_digits(part: Part) -> u8 {
    if part == Part::Exponent { MOST_EXPONENT } else { MOST_DIGITS }
}
