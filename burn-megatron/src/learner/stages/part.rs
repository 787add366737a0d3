//! The parts of a model that is a chain.

use std::fmt;

/// The part of a model that uses a parameter.
///
/// ```
/// use burn_megatron::prelude::*;
///
/// let owner = |path| Part::by_path(path, "tokens|positions", "encoder.layers", "head");
/// assert_eq!(owner("positions.weight"), Some(Part::First));
/// assert_eq!(owner("encoder.layers.12.norm_1.gamma"), Some(Part::Block(12)));
/// assert_eq!(owner("header.weight"), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// [`Stages::first`](super::Stages::first).
    First,
    /// [`Stages::block`](super::Stages::block) of this index.
    Block(usize),
    /// [`Stages::last`](super::Stages::last).
    Last,
    /// The first and the last part, as an embedding whose transpose is the weight of the output layer. Both stages hold
    /// it; its gradient is the sum of both.
    Tied,
    /// Several parts, as the numbers for distances of all blocks of T5's encoder. All their stages hold it; its gradient is
    /// the sum of theirs.
    Shared(Vec<Part>),
}

impl Part {
    /// The part of a parameter whose path begins with one of the fields `first` or `last`, several with `|` between
    /// them, or with an element of the list `blocks`.
    pub fn by_path(path: &str, first: &str, blocks: &str, last: &str) -> Option<Self> {
        let is_in = |fields: &str| fields.split('|').any(|field| below(path, field).is_some());
        if is_in(first) {
            return Some(Self::First);
        }
        if is_in(last) {
            return Some(Self::Last);
        }
        let index = below(path, blocks)?.split('.').next()?;
        index.parse().ok().map(Self::Block)
    }

    /// Whether a model with so many blocks has this part.
    pub(super) fn is_of(&self, blocks: usize) -> bool {
        match self {
            Self::Block(index) => *index < blocks,
            Self::Shared(parts) => !parts.is_empty() && parts.iter().all(|part| part.is_of(blocks)),
            Self::First | Self::Last | Self::Tied => true,
        }
    }
}

/// What follows the field `field` in `path`, if the path begins with it.
fn below<'a>(path: &'a str, field: &str) -> Option<&'a str> {
    let rest = path.strip_prefix(field)?;
    if rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::First => f.write_str("Part::First"),
            Self::Block(index) => write!(f, "Part::Block({index})"),
            Self::Last => f.write_str("Part::Last"),
            Self::Tied => f.write_str("Part::Tied"),
            Self::Shared(parts) => {
                f.write_str("Part::Shared(")?;
                for (index, part) in parts.iter().enumerate() {
                    write!(f, "{}{part}", if index > 0 { ", " } else { "" })?;
                }
                f.write_str(")")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_compared_field_by_field() {
        let owner = |path| Part::by_path(path, "embedding|norm.first", "blocks", "out");
        assert_eq!(owner("embedding"), Some(Part::First));
        assert_eq!(owner("norm.first.gamma"), Some(Part::First));
        assert_eq!(owner("out.weight"), Some(Part::Last));
        assert_eq!(owner("blocks.10.weight"), Some(Part::Block(10)));
        for none in ["embedding2.weight", "blocks.weight", "blocks", "norm.second", "output.bias"] {
            assert_eq!(owner(none), None, "{none}");
        }
    }
}
