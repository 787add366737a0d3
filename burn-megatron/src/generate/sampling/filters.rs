//! Which tokens are drawn from, and the draw. Every filter sees the probabilities among what those before have left, and
//! keeps one token at least.

/// Tokens that may be drawn.
pub(super) struct Candidates<'a> {
    /// By number: rounding that swaps two of nearly the same weight moves a draw little.
    pub tokens: Vec<usize>,
    logits: &'a [f64],
    /// The share of each token; the likeliest has 1.
    weights: Vec<f64>,
}

impl<'a> Candidates<'a> {
    /// All tokens, at a temperature above 0. One logit at least is finite.
    pub fn all(logits: &'a [f64], highest: f64, temperature: f64) -> Self {
        let weights = logits.iter().map(|logit| ((logit - highest) / temperature).exp()).collect();
        Self { tokens: (0..logits.len()).collect(), logits, weights }
    }

    fn weight(&self, token: usize) -> f64 {
        self.weights[token]
    }

    fn total(&self) -> f64 {
        self.tokens.iter().map(|&token| self.weight(token)).sum()
    }

    /// Brings so many of the likeliest to the front, in the order of their likelihood; of equally likely ones the first.
    fn sort_likeliest(&mut self, count: usize) {
        let Self { tokens, weights, .. } = self;
        let by_weight = |a: &usize, b: &usize| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b));
        let count = count.min(tokens.len());
        if count < tokens.len() {
            tokens.select_nth_unstable_by(count, by_weight);
        }
        tokens[..count].sort_unstable_by(by_weight);
    }

    /// Keeps so many of the first.
    fn keep_first(&mut self, count: usize) {
        self.tokens.truncate(count.max(1));
        self.tokens.sort_unstable();
    }

    /// The entropy of the distribution over them, in nats.
    pub fn entropy(&self) -> f64 {
        let total = self.total();
        self.tokens.iter().map(|&token| term(self.weight(token) / total)).sum()
    }

    /// Keeps the likeliest of the first 100 whose terms of the entropy add up to at most this share of it.
    pub fn keep_top_h(&mut self, share: f64) {
        self.sort_likeliest(100);
        self.tokens.truncate(100);
        let (total, most) = (self.total(), share * self.entropy());
        let mut sum = 0.0;
        let end = self.tokens.iter().position(|&token| {
            sum += term(self.weight(token) / total);
            sum > most
        });
        self.keep_first(end.unwrap_or(self.tokens.len()));
    }

    /// Keeps the tokens that are at least as likely as the `k`-th.
    pub fn keep_top_k(&mut self, k: usize) {
        if k < self.tokens.len() {
            let (logits, mut order) = (self.logits, self.tokens.clone());
            let (_, last, _) = order.select_nth_unstable_by(k - 1, |&a, &b| logits[b].total_cmp(&logits[a]));
            let threshold = logits[*last];
            self.tokens.retain(|&token| logits[token] >= threshold);
        }
    }

    /// Keeps the likeliest tokens as long as those before them have not reached the share `p` of the whole weight; of
    /// equally likely ones the first.
    pub fn keep_top_p(&mut self, p: f64) {
        let (enough, all) = (p * self.total(), self.tokens.len());
        // Mostly a few of a vocabulary.
        let mut count = 256;
        let end = loop {
            self.sort_likeliest(count);
            let mut before = 0.0;
            let end = self.tokens.iter().take(count).position(|&token| {
                let reached = before >= enough;
                before += self.weight(token);
                reached
            });
            match end {
                Some(end) => break end,
                None if count >= all => break all,
                None => count *= 16,
            }
        };
        self.keep_first(end);
    }

    /// Keeps the tokens that are at least `p` times as likely as the likeliest.
    pub fn keep_min_p(&mut self, p: f64) {
        self.keep_weights(p);
    }

    /// Keeps those first whose surprise is nearest to the entropy, until they reach the share `p`, and those as near as the
    /// last of them.
    pub fn keep_typical(&mut self, p: f64) {
        let (total, entropy) = (self.total(), self.entropy());
        let mut order: Vec<(f64, f64, usize)> = (self.tokens.iter())
            .map(|&token| (self.weight(token) / total, token))
            .map(|(share, token)| ((-share.ln() - entropy).abs(), share, token))
            .collect();
        order.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut sum = 0.0;
        let last = order.iter().position(|(_, share, _)| {
            sum += share;
            sum >= p
        });
        let most = order[last.unwrap_or(order.len() - 1)].0;
        self.tokens = order.into_iter().filter(|(distance, ..)| *distance <= most).map(|(.., token)| token).collect();
        self.tokens.sort_unstable();
    }

    /// Keeps the tokens that have at least this probability, and the likeliest.
    pub fn keep_probability(&mut self, least: f64) {
        self.keep_weights(least * self.total());
    }

    fn keep_weights(&mut self, least: f64) {
        let highest = self.tokens.iter().map(|&token| self.weight(token)).fold(0.0, f64::max);
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.retain(|&token| self.weight(token) >= least.min(highest));
        self.tokens = tokens;
    }

    /// The token under the point `at`, from `[0, 1)`, when each takes a share of the line as long as its weight.
    pub fn draw(&self, at: f64) -> usize {
        let mut left = at * self.total();
        for &token in &self.tokens {
            left -= self.weight(token);
            if left < 0.0 {
                return token;
            }
        }
        // Rounding: the last one that can be drawn at all.
        self.tokens.iter().rev().copied().find(|&token| self.weight(token) > 0.0).unwrap_or(self.tokens[0])
    }
}

/// What a token of this probability adds to the entropy.
fn term(share: f64) -> f64 {
    if share > 0.0 { -share * share.ln() } else { 0.0 }
}
