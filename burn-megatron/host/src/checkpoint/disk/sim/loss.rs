//! What is left of files and folders when the process or the power is gone.

use super::world::Node;

/// What a power cut takes of the changes that were not made durable.
#[derive(Clone, Copy, Debug)]
pub(in super::super::super) enum Loss {
    /// Nothing: only the process ended.
    Nothing,
    /// All of them.
    Everything,
    /// The contents of files, not their names.
    Contents,
    /// Some, by chance: any of the changed names, and of the contents all, none or half.
    Some(u64),
}

/// The nodes after it.
pub(super) fn survivors(nodes: &[Node], loss: Loss) -> Vec<Node> {
    let mut chance = Chance(if let Loss::Some(seed) = loss { seed } else { 0 });
    let survive = |node: &Node| match node {
        Node::File { now, safe } => {
            let kept = match loss {
                Loss::Nothing => now.clone(),
                Loss::Everything | Loss::Contents => safe.clone(),
                Loss::Some(_) => match chance.below(3) {
                    0 => now.clone(),
                    1 => safe.clone(),
                    _ => now[..safe.len().max(now.len() / 2).min(now.len())].to_vec(),
                },
            };
            Node::File { now: kept.clone(), safe: kept }
        }
        Node::Folder { safe, pending, .. } => {
            let mut names = safe.clone();
            let kept = pending.iter().filter(|_| match loss {
                Loss::Nothing | Loss::Contents => true,
                Loss::Everything => false,
                Loss::Some(_) => chance.below(2) == 0,
            });
            kept.for_each(|change| change.apply(&mut names));
            Node::folder(names)
        }
    };
    nodes.iter().map(survive).collect()
}

/// A linear congruential generator (Knuth's MMIX constants).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}
