//! What rules do to the logits after a text.

use crate::json_grammar::TokenSet;

/// The logit of a token that does not come.
pub(super) const NEVER: f64 = f64::NEG_INFINITY;

/// What is done to the logit of a token, in the order of the fields.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Added to it.
    pub plus: f64,
    /// Divides a positive one and multiplies a negative one.
    pub times: f64,
    /// Taken from it; ∞ if the token does not come.
    pub less: f64,
    /// So many times its magnitude is added.
    pub grown: f64,
}

impl Change {
    /// It stays.
    pub const NONE: Self = Self { plus: 0.0, times: 1.0, less: 0.0, grown: 0.0 };

    /// That of two rules.
    fn and(self, other: Self) -> Self {
        let (plus, times, less) = (self.plus + other.plus, self.times * other.times, self.less + other.less);
        Self { plus, times, less, grown: self.grown.max(other.grown) }
    }

    fn of(self, logit: f64) -> f64 {
        let Self { plus, times, less, grown } = self;
        let logit = logit + plus;
        let logit = if logit < 0.0 { logit * times } else { logit / times } - less;
        if logit.is_finite() { logit + logit.abs() * grown } else { logit }
    }
}

/// Changes of the logits of a vocabulary. Tokens that it does not have are passed over.
#[derive(Clone, Debug, PartialEq)]
pub struct Changes {
    vocabulary: usize,
    tokens: Vec<(usize, Change)>,
    only: Option<TokenSet>,
    forced: bool,
}

impl Changes {
    /// None.
    pub(super) fn of(vocabulary: usize) -> Self {
        Self { vocabulary, tokens: Vec::new(), only: None, forced: false }
    }

    /// Those of the tokens that the vocabulary has.
    pub(super) fn set(&self, tokens: &[i64]) -> TokenSet {
        let mut set = TokenSet::default();
        let known = tokens.iter().filter_map(|token| self.known(*token));
        known.for_each(|token| set.insert(token as u32));
        set
    }

    fn known(&self, token: i64) -> Option<usize> {
        usize::try_from(token).ok().filter(|token| *token < self.vocabulary)
    }

    pub(super) fn add(&mut self, token: i64, change: Change) {
        self.tokens.extend(self.known(token).map(|token| (token, change)));
    }

    pub(super) fn forbid(&mut self, tokens: &[i64]) {
        tokens.iter().for_each(|token| self.add(*token, Change { less: f64::INFINITY, ..Change::NONE }));
    }

    /// Leaves these alone.
    pub(super) fn keep(&mut self, tokens: TokenSet) {
        match &mut self.only {
            Some(only) => only.intersect(&tokens),
            None => self.only = Some(tokens),
        }
    }

    /// Leaves these alone, all as likely, whatever was before.
    pub(super) fn force(&mut self, tokens: TokenSet) {
        *self = Self { only: Some(tokens), forced: true, ..Self::of(self.vocabulary) };
    }

    /// The tokens whose logits change, each once, and how.
    pub fn tokens(&self) -> Vec<(usize, Change)> {
        let mut tokens = self.tokens.clone();
        // Most often a rule alone, which counts them in order.
        if !tokens.is_sorted_by(|a, b| a.0 < b.0) {
            tokens.sort_by_key(|(token, _)| *token);
            tokens.dedup_by(|next, first| {
                let same = next.0 == first.0;
                if same {
                    first.1 = first.1.and(next.1);
                }
                same
            });
        }
        tokens
    }

    /// All that may come, if some may not.
    pub fn only(&self) -> Option<&TokenSet> {
        self.only.as_ref()
    }

    /// Whether those that may come are as likely, whatever their logits are.
    pub fn are_forced(&self) -> bool {
        self.forced
    }

    /// The logits as the rules leave them: −∞ for a token that does not come.
    pub fn apply(&self, logits: &mut [f64]) {
        if let Some(only) = &self.only {
            let is_left = |token| only.contains(token);
            for (token, logit) in logits.iter_mut().enumerate() {
                *logit = if !is_left(token) {
                    NEVER
                } else if self.forced {
                    0.0
                } else {
                    *logit
                };
            }
        }
        for (token, change) in self.tokens() {
            if let Some(logit) = logits.get_mut(token) {
                *logit = change.of(*logit);
            }
        }
    }
}
