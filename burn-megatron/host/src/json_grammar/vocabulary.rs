//! The texts of tokens, and which of them an automaton takes.

use super::JsonGrammar;
use super::stack::{Expected, Stack};

/// The bytes of every token of a vocabulary, as `data::token_bytes` gives them.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenTexts {
    texts: Vec<Vec<u8>>,
    all: Trie,
    /// Whole characters that may be anywhere in a string: how many each token has, and the token; the fewest first.
    plain: Vec<(u32, u32)>,
    plain_set: TokenSet,
    /// All but these.
    others: Trie,
    /// Most bytes of a token.
    longest: u32,
}

/// Some tokens of a vocabulary: a bit each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenSet(Vec<u64>);

/// Tokens by their texts: a node for each byte, behind the one of the byte before it.
#[derive(Clone, Debug, Default, PartialEq)]
struct Trie {
    nodes: Vec<TrieNode>,
    tokens: Vec<u32>,
}

#[derive(Clone, Debug, PartialEq)]
struct TrieNode {
    byte: u8,
    /// Bytes before it.
    depth: u32,
    /// The first node that has not these bytes before it.
    end: u32,
    /// Those of the tokens that end here.
    tokens: std::ops::Range<u32>,
}

impl TokenTexts {
    /// By number; a token without bytes is never taken.
    pub fn new(texts: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let texts: Vec<Vec<u8>> = texts.into_iter().collect();
        let mut sorted: Vec<u32> = (0..texts.len() as u32).filter(|token| !texts[*token as usize].is_empty()).collect();
        sorted.sort_by_key(|token| &texts[*token as usize]);
        let is_plain = |token: &u32| {
            let text = std::str::from_utf8(&texts[*token as usize]).ok()?;
            let is_free = text.bytes().all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\');
            is_free.then(|| (text.chars().count() as u32, *token))
        };
        let mut plain: Vec<(u32, u32)> = sorted.iter().filter_map(is_plain).collect();
        plain.sort_unstable();
        let others: Vec<u32> = sorted.iter().copied().filter(|token| is_plain(token).is_none()).collect();
        let mut plain_set = TokenSet::default();
        plain.iter().for_each(|(_, token)| plain_set.insert(*token));
        let longest = texts.iter().map(Vec::len).max().unwrap_or(0) as u32;
        Self { all: Trie::new(&sorted, &texts), others: Trie::new(&others, &texts), texts, plain, plain_set, longest }
    }

    /// The bytes of a token.
    pub fn text(&self, token: i64) -> &[u8] {
        usize::try_from(token).ok().and_then(|token| self.texts.get(token)).map_or(&[], Vec::as_slice)
    }

    pub(super) fn longest(&self) -> u32 {
        self.longest
    }
}

impl TokenSet {
    /// Whether a token is among them.
    pub fn contains(&self, token: usize) -> bool {
        self.0.get(token / 64).is_some_and(|bits| bits >> (token % 64) & 1 == 1)
    }

    /// In order.
    pub fn iter(&self) -> impl Iterator<Item = i64> {
        (0..self.0.len() * 64).filter(|token| self.contains(*token)).map(|token| token as i64)
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|bits| *bits == 0)
    }

    /// The bits of 64 tokens at a time.
    pub fn words(&self) -> &[u64] {
        &self.0
    }

    /// Leaves those that the other has too.
    pub fn intersect(&mut self, other: &Self) {
        self.0.truncate(other.0.len());
        self.0.iter_mut().zip(&other.0).for_each(|(bits, more)| *bits &= more);
    }

    /// Takes one away.
    pub fn remove(&mut self, token: usize) {
        if let Some(bits) = self.0.get_mut(token / 64) {
            *bits &= !(1 << (token % 64));
        }
    }

    /// Adds one.
    pub fn insert(&mut self, token: u32) {
        let at = token as usize / 64;
        if at >= self.0.len() {
            self.0.resize(at + 1, 0);
        }
        self.0[at] |= 1 << (token % 64);
    }

    fn extend(&mut self, other: &Self) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0.iter_mut().zip(&other.0).for_each(|(bits, more)| *bits |= more);
    }
}

impl Trie {
    /// Of tokens in the order of their texts.
    fn new(sorted: &[u32], texts: &[Vec<u8>]) -> Self {
        let (mut trie, mut path) = (Self::default(), Vec::<usize>::new());
        let mut before: &[u8] = &[];
        for token in sorted {
            let text = texts[*token as usize].as_slice();
            let same = text.iter().zip(before).take_while(|(a, b)| a == b).count();
            trie.close(&mut path, same);
            for (depth, byte) in text.iter().enumerate().skip(same) {
                path.push(trie.nodes.len());
                let tokens = trie.tokens.len() as u32..trie.tokens.len() as u32;
                trie.nodes.push(TrieNode { byte: *byte, depth: depth as u32, end: 0, tokens });
            }
            trie.tokens.push(*token);
            if let Some(last) = path.last() {
                trie.nodes[*last].tokens.end = trie.tokens.len() as u32;
            }
            before = text;
        }
        trie.close(&mut path, 0);
        trie
    }

    /// No more nodes come behind those from `depth` on.
    fn close(&mut self, path: &mut Vec<usize>, depth: usize) {
        let end = self.nodes.len() as u32;
        path.drain(depth..).for_each(|node| self.nodes[node].end = end);
    }

    /// Adds the tokens through whose bytes `step` leads from `states` to others.
    fn add<S>(&self, states: S, step: impl Fn(&S, u8) -> Option<S>, found: &mut TokenSet) {
        let (mut path, mut at) = (vec![states], 0);
        while let Some(node) = self.nodes.get(at) {
            path.truncate(node.depth as usize + 1);
            match step(&path[node.depth as usize], node.byte) {
                Some(states) => {
                    path.push(states);
                    let tokens = node.tokens.start as usize..node.tokens.end as usize;
                    self.tokens[tokens].iter().for_each(|token| found.insert(*token));
                    at += 1;
                }
                None => at = node.end as usize,
            }
        }
    }
}

impl JsonGrammar {
    /// The tokens that may follow. Within strings and keys most of them are known without their bytes.
    pub(super) fn allowed(&self, stacks: &[Stack], tokens: &TokenTexts) -> TokenSet {
        let step = |stacks: &Vec<Stack>, byte| Some(self.step(stacks, byte)).filter(|stacks| !stacks.is_empty());
        let (inside, outside): (Vec<Stack>, Vec<Stack>) =
            stacks.iter().cloned().partition(|stack| characters(stack).is_some());
        let mut found = TokenSet::default();
        if !outside.is_empty() {
            tokens.all.add(outside, step, &mut found);
        }
        if let Some(most) = inside.iter().filter_map(characters).max() {
            if most >= tokens.longest {
                found.extend(&tokens.plain_set);
            } else {
                let few = tokens.plain.iter().take_while(|(characters, _)| *characters <= most);
                few.for_each(|(_, token)| found.insert(*token));
            }
            tokens.others.add(inside, step, &mut found);
        }
        found
    }
}

/// How many characters may follow, if any may.
fn characters(stack: &Stack) -> Option<u32> {
    match stack.top()?.expected {
        Expected::Text { most, .. } => Some(most),
        Expected::KeyText { key, .. } if key.is_free && key.within.is_none() => Some(super::stack::NO_LIMIT),
        _ => None,
    }
}
