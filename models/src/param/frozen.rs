//! Parameters that are frozen by their names.

use backend_dist::shard::{Init, Section};

use super::{BuildError, ParamBuilder, Result};
use crate::names::fits;

impl ParamBuilder<'_> {
    /// Parameters whose names [fit](fits) one of these patterns are frozen: they have no gradient and are unknown to the
    /// optimizer, and checkpoints have them with the other weights.
    pub fn with_frozen(mut self, patterns: &[String]) -> Self {
        self.frozen = patterns.to_vec();
        self
    }

    /// Whether a parameter or state that is not of an adapter is frozen: by its name, or because there are adapters.
    pub(crate) fn is_frozen(&self, name: &str) -> bool {
        self.has_adapters() || self.frozen.iter().any(|pattern| fits(pattern, name))
    }

    /// Whether a parameter of these sections is frozen.
    ///
    /// # Errors
    /// If some of the sections are.
    pub(super) fn freezes(&self, sections: &[(Section, Init)]) -> Result<bool> {
        let (frozen, other): (Vec<&str>, Vec<&str>) =
            sections.iter().map(|(section, _)| section.name.as_str()).partition(|name| self.is_frozen(name));
        match (frozen.first(), other.first()) {
            (Some(frozen), Some(other)) => {
                Err(BuildError::HalfFrozen { frozen: frozen.to_string(), other: other.to_string() })
            }
            (first, _) => Ok(first.is_some()),
        }
    }
}
