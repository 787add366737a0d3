//! Texts of a regular expression: an automaton over the bytes of characters, from whose states a whole text can be reached.

use std::collections::HashMap;

use regex_automata::Anchored;
use regex_automata::dfa::{Automaton, StartKind, dense};
use regex_automata::nfa::thompson;
use regex_automata::util::start::Config as Start;
use regex_automata::util::syntax;

use super::stack::{Expected, Stack};
use super::{JsonGrammar, Node};

/// Most bytes of an automaton while it is made: milliseconds, and a schema comes from anybody.
const MOST_BYTES: usize = 4 << 20;

/// The automaton of an expression.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Pattern {
    /// Bytes that lead from every state to the same ones.
    classes: Vec<u8>,
    /// By class.
    states: Vec<State>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct State {
    next: Vec<Option<u32>>,
    may_end: bool,
}

impl Pattern {
    /// The first state.
    pub const START: u32 = 0;

    /// Of an expression in the syntax of the crate `regex`, which the whole text must be. Fails in words.
    pub fn new(expression: &str) -> Result<Self, String> {
        let said = |error: &dyn std::fmt::Display| {
            let text = error.to_string();
            text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_string()
        };
        syntax::parse(expression).map_err(|error| said(&error))?;
        let limited = dense::Config::new()
            .start_kind(StartKind::Anchored)
            .dfa_size_limit(Some(MOST_BYTES))
            .determinize_size_limit(Some(MOST_BYTES));
        let dfa = dense::Builder::new()
            .configure(limited)
            .thompson(thompson::Config::new().nfa_size_limit(Some(MOST_BYTES)))
            .build(expression)
            // Nothing else is wrong with what was parsed.
            .map_err(|_| format!("its automaton has more than {} MiB", MOST_BYTES >> 20))?;
        let start = dfa.start_state(&Start::new().anchored(Anchored::Yes)).map_err(|error| said(&error))?;
        let classes: Vec<u8> = (0..=u8::MAX).map(|byte| dfa.byte_classes().get(byte)).collect();
        let first = |class: usize| (0..=u8::MAX).find(|byte| classes[*byte as usize] == class as u8);
        let representatives: Vec<u8> = (0..dfa.byte_classes().alphabet_len() - 1).map_while(first).collect();
        let (mut known, mut all, mut states) = (HashMap::from([(start, 0)]), vec![start], Vec::new());
        while let Some(&at) = all.get(states.len()) {
            let mut next = Vec::with_capacity(representatives.len());
            for byte in &representatives {
                let to = dfa.next_state(at, *byte);
                next.push((!dfa.is_dead_state(to)).then(|| {
                    *known.entry(to).or_insert_with(|| {
                        all.push(to);
                        all.len() as u32 - 1
                    })
                }));
            }
            states.push(State { next, may_end: dfa.is_match_state(dfa.next_eoi_state(at)) });
        }
        Self { classes, states }.living()
    }

    /// Numbers that `of`, counted in this decimal place, divides: where they are numbers at all.
    pub fn multiples(of: u64, place: usize) -> Self {
        let class = |byte: u8| match byte {
            b'0'..=b'9' => byte - b'0',
            b'.' => 10,
            b'-' => 11,
            _ => 12,
        };
        let rest = |rest: u64, digit: u64| (rest * 10 + digit) % of;
        // By what is left of the digits so far: in front of the point, and behind it by how many there are.
        let at =
            |rest: u64, digits: Option<usize>| Some((digits.map_or(0, |digits| digits + 1) as u64 * of + rest) as u32);
        let state = |left: u64, digits: Option<usize>| {
            let mut next: Vec<Option<u32>> = (0..10)
                .map(|digit| match digits {
                    None => at(rest(left, digit), None),
                    Some(digits) if digits < place => at(rest(left, digit), Some(digits + 1)),
                    Some(_) => at(left, digits).filter(|_| digit == 0),
                })
                .collect();
            next.extend([at(left, Some(0)).filter(|_| digits.is_none()), at(left, digits), None]);
            let missing = place - digits.unwrap_or(0);
            State { next, may_end: (0..missing).fold(left, |left, _| rest(left, 0)) == 0 }
        };
        let behind = (0..=place).map(Some);
        let states = [None].into_iter().chain(behind).flat_map(|digits| (0..of).map(move |left| state(left, digits)));
        Self { classes: (0..=u8::MAX).map(class).collect(), states: states.collect() }
    }

    /// The texts that are of both, in at most `most` ways from states to others. Fails in words.
    pub fn and(&self, other: &Self, most: usize) -> Result<Self, String> {
        let mut kinds: Vec<(u8, u8)> = Vec::new();
        let mut class = |pair: (u8, u8)| {
            let known = kinds.iter().position(|kind| *kind == pair);
            known.unwrap_or_else(|| {
                kinds.push(pair);
                kinds.len() - 1
            }) as u8
        };
        let classes = self.classes.iter().zip(&other.classes).map(|(a, b)| class((*a, *b))).collect();
        let (mut known, mut all, mut states) = (HashMap::from([((0, 0), 0)]), vec![(0, 0)], Vec::new());
        while let Some(&(a, b)) = all.get(states.len()) {
            if all.len() * kinds.len() > most {
                return Err(format!("their automaton has more than {most} ways from states to others"));
            }
            let [a, b] = [&self.states[a as usize], &other.states[b as usize]];
            let next = kinds.iter().map(|(of_a, of_b)| {
                let to = (a.next[*of_a as usize]?, b.next[*of_b as usize]?);
                Some(*known.entry(to).or_insert_with(|| {
                    all.push(to);
                    all.len() as u32 - 1
                }))
            });
            states.push(State { next: next.collect(), may_end: a.may_end && b.may_end });
        }
        Self { classes, states }.living()
    }

    /// Without dead ends. Fails if nothing is left.
    fn living(mut self) -> Result<Self, String> {
        self.keep_living();
        match &self.states[0] {
            State { may_end: false, next } if next.iter().all(Option::is_none) => Err("no text is one".into()),
            _ => Ok(self),
        }
    }

    /// Forgets ways to states from which no whole text is reached with characters that a JSON string may have in one byte or an
    /// escape of two.
    fn keep_living(&mut self) {
        let mut before = vec![Vec::new(); self.states.len()];
        let written = |byte: &u8| *byte >= b' ' || unescaped_of(*byte).is_some();
        let mut usable = vec![false; self.states[0].next.len()];
        (0..=u8::MAX).filter(written).for_each(|byte| usable[self.classes[byte as usize] as usize] = true);
        for (from, state) in self.states.iter().enumerate() {
            let next = state.next.iter().zip(&usable).filter(|(_, usable)| **usable);
            next.filter_map(|(to, _)| *to).for_each(|to| before[to as usize].push(from));
        }
        let mut open: Vec<usize> = (0..self.states.len()).filter(|at| self.states[*at].may_end).collect();
        let mut lives = vec![false; self.states.len()];
        while let Some(at) = open.pop() {
            if !std::mem::replace(&mut lives[at], true) {
                open.append(&mut before[at]);
            }
        }
        let is_living = |to: &u32| lives[*to as usize];
        for state in &mut self.states {
            state.next.iter_mut().zip(&usable).for_each(|(to, usable)| *to = to.filter(|to| *usable && is_living(to)));
        }
    }

    /// From states to others.
    pub fn ways(&self) -> usize {
        self.states.len() * self.states[0].next.len()
    }

    pub fn next(&self, state: u32, byte: u8) -> Option<u32> {
        self.states[state as usize].next[self.classes[byte as usize] as usize]
    }

    pub fn may_end(&self, state: u32) -> bool {
        self.states[state as usize].may_end
    }
}

/// The letters of escapes of one byte, and what they stand for.
const ESCAPES: [(u8, u8); 8] =
    [(b'"', b'"'), (b'\\', b'\\'), (b'/', b'/'), (b'b', 8), (b'f', 12), (b'n', b'\n'), (b'r', b'\r'), (b't', b'\t')];

fn unescaped_of(byte: u8) -> Option<u8> {
    ESCAPES.iter().find(|(_, of)| *of == byte).map(|(letter, _)| *letter)
}

impl JsonGrammar {
    /// A byte of a string of a pattern, behind its first quote. Its characters are themselves or escapes of two bytes.
    pub(super) fn push_string(
        &self,
        (node, state, is_escaped): (usize, u32, bool),
        below: &Stack,
        byte: u8,
        next: &mut Vec<Stack>,
    ) {
        let Node::Pattern { pattern, .. } = &self.nodes[node] else { return };
        let on = |state, is_escaped| below.on(Expected::Pattern { node, state, is_escaped });
        match byte {
            _ if is_escaped => {
                let of = ESCAPES.iter().find(|(letter, _)| *letter == byte);
                next.extend(of.and_then(|(_, of)| pattern.next(state, *of)).map(|state| on(state, false)));
            }
            b'"' => next.extend(pattern.may_end(state).then(|| below.clone())),
            b'\\' => {
                let goes_on = ESCAPES.iter().any(|(_, of)| pattern.next(state, *of).is_some());
                next.extend(goes_on.then(|| on(state, true)));
            }
            ..b' ' => {}
            _ => next.extend(pattern.next(state, byte).map(|state| on(state, false))),
        }
    }

    /// A byte of a number of a pattern, or the one behind it.
    pub(super) fn push_number(&self, (node, state): (usize, u32), below: &Stack, byte: u8, next: &mut Vec<Stack>) {
        let Node::Pattern { pattern, .. } = &self.nodes[node] else { return };
        match pattern.next(state, byte) {
            Some(state) => next.push(below.on(Expected::Pattern { node, state, is_escaped: false })),
            None if pattern.may_end(state) => self.push(below, byte, next),
            None => {}
        }
    }
}
