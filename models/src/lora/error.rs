//! Why a model cannot have adapters.

use thiserror::Error;

use super::ALL_LINEAR;

/// Why a model cannot have these adapters.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum LoraError {
    /// A number is not legal.
    #[error("{key} = {value} is not {legal}")]
    Value { key: &'static str, value: String, legal: &'static str },
    /// No module has this name.
    #[error("target_modules: the model has no linear layer `{target}`; it has {known}, or {ALL_LINEAR}")]
    Target { target: String, known: String },
    /// No layers are named.
    #[error("target_modules is empty; nearest legal: {ALL_LINEAR}")]
    Empty,
    /// A rank above both sides of a matrix trains more numbers than the matrix has.
    #[error("{key} = {rank} is more than the features of `{module}`, {} and {}; nearest legal: {}", .shape[1], .shape[0], .shape[0].max(.shape[1]))]
    Rank { key: &'static str, rank: usize, module: String, shape: [usize; 2] },
    /// Exceptions and a choice of layers leave nothing.
    #[error("target_modules: `{targets}` leaves no linear layer of this model that has an adapter")]
    NoTarget { targets: String },
    /// A module without adapter has a rank or scale.
    #[error("{key}: no module with an adapter is called `{pattern}`; these are {known}")]
    Pattern { key: &'static str, pattern: String, known: String },
    /// A module has two.
    #[error("{key}: `{}` and `{}` both fit `{module}`; name it once", .patterns[0], .patterns[1])]
    Twice { key: &'static str, patterns: [String; 2], module: String },
    /// One of all layers cannot.
    #[error("target_modules: {ALL_LINEAR} has `{module}` among others, and {why}; name those that can: {others}")]
    AllLinear { module: String, why: &'static str, others: String },
    /// Experts of a layer have several ranks or scales.
    #[error(
        "{key}: gate and up of a layer's experts have adapters of one rank and scale, and so have all down, but `{module}` has \
         another than one before it; name them all with one pattern, such as `layers.1.*.experts.*`"
    )]
    Experts { key: &'static str, module: String },
    /// A module that is stored in another form than a matrix of its own.
    #[error("target_modules: adapters of `{module}` are not supported: {why}")]
    Unsupported { module: String, why: &'static str },
    /// A frozen weight cannot be stored in few bits.
    #[error("base: `{layer}`: {what}")]
    Base { layer: String, what: String },
    /// The layers that were built have no adapter although they should.
    #[error("target_modules: the layer `{0}` cannot have an adapter in this model")]
    Unclaimed(
        /// Our name.
        String,
    ),
}

impl LoraError {
    /// The key that is wrong, as peft calls it. The message begins with it.
    pub fn key(&self) -> &'static str {
        match self {
            Self::Value { key, .. }
            | Self::Rank { key, .. }
            | Self::Pattern { key, .. }
            | Self::Twice { key, .. }
            | Self::Experts { key, .. } => key,
            Self::Target { .. }
            | Self::Empty
            | Self::NoTarget { .. }
            | Self::AllLinear { .. }
            | Self::Unsupported { .. }
            | Self::Unclaimed(_) => "target_modules",
            Self::Base { .. } => "base",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_begin_with_the_key() {
        let key = "rank_pattern";
        let [module, target, known, others, pattern, layer, what, targets, value] =
            std::array::from_fn(|_| String::new());
        let patterns = [pattern.clone(), pattern.clone()];
        for error in [
            LoraError::Value { key, value, legal: "" },
            LoraError::Target { target, known: known.clone() },
            LoraError::Empty,
            LoraError::Rank { key, rank: 1, module: module.clone(), shape: [1, 1] },
            LoraError::NoTarget { targets },
            LoraError::Pattern { key, pattern, known },
            LoraError::Twice { key, patterns, module: module.clone() },
            LoraError::AllLinear { module: module.clone(), why: "", others },
            LoraError::Experts { key, module: module.clone() },
            LoraError::Unsupported { module: module.clone(), why: "" },
            LoraError::Base { layer, what },
            LoraError::Unclaimed(module),
        ] {
            let rest = error.to_string().strip_prefix(error.key()).map(|rest| rest.starts_with([':', ' ']));
            assert_eq!(rest, Some(true), "{error}");
        }
    }
}
