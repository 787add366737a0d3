//! How deep a value's text is at least.

use super::{JsonGrammar, MOST_DEPTH, Node};

/// No text is deep enough, or none ends.
const NEVER: usize = MOST_DEPTH + 1;

impl JsonGrammar {
    /// Works out the heights of all nodes: what is never whole within the greatest depth is never begun, so that no text comes to
    /// where nothing may follow.
    pub(super) fn measure(&mut self) {
        self.heights = vec![NEVER; self.nodes.len()];
        let mut changed = true;
        while changed {
            changed = false;
            for node in 0..self.nodes.len() {
                let height = self.height(node);
                changed |= height < self.heights[node];
                self.heights[node] = height;
            }
        }
    }

    /// From what is known of others.
    fn height(&self, node: usize) -> usize {
        let of = |node: &usize| self.heights[*node];
        let inside = match &self.nodes[node] {
            Node::Any | Node::Texts(_) | Node::Text { .. } | Node::Number { .. } | Node::Pattern { .. } => return 0,
            Node::Choice(all) => return all.iter().map(of).min().unwrap_or(NEVER),
            Node::Array { min: 0, .. } => 0,
            Node::Array { items, .. } => of(items),
            Node::Object { keys, needed, .. } => {
                let is_needed = |at: usize| needed >> at & 1 == 1;
                keys.iter()
                    .enumerate()
                    .filter(|(at, _)| is_needed(*at))
                    .map(|(_, key)| of(&key.value))
                    .max()
                    .unwrap_or(0)
            }
        };
        (1 + inside).min(NEVER)
    }
}
