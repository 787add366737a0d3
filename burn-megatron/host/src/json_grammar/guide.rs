//! A text of a grammar, token by token.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::stack::Stack;
use super::{JsonGrammar, TokenSet, TokenTexts};

/// Most states whose tokens are kept.
const MOST_SETS: usize = 64;

/// A text of a grammar, written with the tokens of a vocabulary.
#[derive(Debug)]
pub struct Guide {
    grammar: Arc<JsonGrammar>,
    tokens: Arc<TokenTexts>,
    /// The tokens that may follow, of states that were met.
    sets: Arc<Mutex<HashMap<Vec<Stack>, Arc<TokenSet>>>>,
    progress: Mutex<Progress>,
}

/// The states after what is written.
#[derive(Debug)]
struct Progress {
    written: Vec<i64>,
    stacks: Vec<Stack>,
}

impl Guide {
    /// What is legal, and the bytes of tokens.
    pub fn new(grammar: JsonGrammar, tokens: Arc<TokenTexts>) -> Self {
        let progress = Progress { written: Vec::new(), stacks: vec![grammar.start()] };
        Self { grammar: grammar.into(), tokens, sets: Arc::default(), progress: progress.into() }
    }

    /// One for another text of the same kind: a guide knows what was written last, so that only new tokens are read. What it says
    /// does not depend on it.
    pub fn another(&self) -> Self {
        let progress = Progress { written: Vec::new(), stacks: vec![self.grammar.start()] };
        let (grammar, tokens) = (Arc::clone(&self.grammar), Arc::clone(&self.tokens));
        Self { grammar, tokens, sets: Arc::clone(&self.sets), progress: progress.into() }
    }

    /// The tokens that may follow these, and whether the text may end.
    pub fn next(&self, written: &[i64]) -> (Arc<TokenSet>, bool) {
        let mut progress = self.progress.lock();
        if !written.starts_with(&progress.written) {
            *progress = Progress { written: Vec::new(), stacks: vec![self.grammar.start()] };
        }
        let new = &written[progress.written.len()..];
        let bytes = new.iter().flat_map(|token| self.tokens.text(*token)).copied();
        let stacks = self.grammar.resume(std::mem::take(&mut progress.stacks), bytes);
        progress.written.extend(new);
        progress.stacks.clone_from(&stacks);
        drop(progress);
        let may_end = self.grammar.may_end_in(&stacks);
        let key: Vec<Stack> = stacks.iter().map(|stack| stack.near(self.tokens.longest())).collect();
        if let Some(known) = self.sets.lock().get(&key) {
            return (Arc::clone(known), may_end);
        }
        let found = Arc::new(self.grammar.allowed(&key, &self.tokens));
        let mut sets = self.sets.lock();
        if sets.len() >= MOST_SETS {
            sets.clear();
        }
        sets.insert(key, Arc::clone(&found));
        (found, may_end)
    }
}

/// Guides to the same texts.
impl PartialEq for Guide {
    fn eq(&self, other: &Self) -> bool {
        let same_tokens = Arc::ptr_eq(&self.tokens, &other.tokens) || self.tokens == other.tokens;
        self.grammar == other.grammar && same_tokens
    }
}
