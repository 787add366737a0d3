//! Choices without choices in them.

use std::collections::HashMap;

use super::{JsonGrammar, MOST_READINGS, Node};

impl JsonGrammar {
    /// Replaces choices among choices by what these are of: each node once.
    ///
    /// # Errors
    /// Names the reference that is nothing but itself, or how many alternatives are too many.
    pub(super) fn flatten(&mut self, references: &HashMap<String, usize>) -> Result<(), String> {
        // By which choice a node was found last.
        let mut found_by = vec![usize::MAX; self.nodes.len()];
        for node in 0..self.nodes.len() {
            if !matches!(self.nodes[node], Node::Choice(_)) {
                continue;
            }
            let (mut open, mut leaves) = (vec![node], Vec::new());
            while let Some(at) = open.pop() {
                if std::mem::replace(&mut found_by[at], node) == node {
                    continue;
                }
                match &self.nodes[at] {
                    Node::Choice(all) => open.extend(all.iter().rev()),
                    _ => leaves.push(at),
                }
            }
            if leaves.is_empty() {
                let name = references.iter().find(|(_, at)| **at == node).map_or("", |(name, _)| name);
                return Err(format!("#{name}: it is nothing but itself"));
            }
            if leaves.len() > MOST_READINGS {
                return Err(format!("{} alternatives of a value; at most {MOST_READINGS} are supported", leaves.len()));
            }
            self.nodes[node] = Node::Choice(leaves);
        }
        Ok(())
    }
}
