//! Numbers that a module shows and its parameters do not tell, such as how many heads attention has.

use burn::module::{DisplaySettings, Module, ModuleDisplay, ModuleMapper, Param};
use burn::tensor::Tensor;

/// A number that a module shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Attribute {
    /// The module's path.
    pub module: String,
    /// The attribute's name.
    pub name: String,
    /// Its value.
    pub value: usize,
}

/// The attributes with these names, wherever in the module they are.
///
/// A module shows all its attributes when it is asked to. There is no other way to those that are no parameters. Parameters
/// that are not initialized yet remain so.
pub(super) fn attributes<M: Module + ModuleDisplay>(module: &M, names: &[&str]) -> Vec<Attribute> {
    let settings = DisplaySettings::new().with_show_all_attributes(true).with_new_line_after_attribute(true);
    read(&module.clone().map(&mut StandIns).format(settings), names)
}

/// One element in place of each parameter that is not initialized: a parameter that is shown is made for it, and a model may
/// have more of them than there is memory.
struct StandIns;

impl ModuleMapper for StandIns {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.is_initialized() {
            true => param,
            false => Param::initialized(param.id, Tensor::zeros([1; D], &param.lazy_device())),
        }
    }
}

/// Reads lines of three kinds: `name: Type {`, `name: value` and `}`.
fn read(text: &str, names: &[&str]) -> Vec<Attribute> {
    let (mut path, mut found) = (Vec::new(), Vec::new());
    for line in text.lines().skip(1).map(str::trim) {
        let (name, value) = line.split_once(": ").unwrap_or((line, ""));
        if value.ends_with('{') {
            path.push(name);
        } else if line == "}" {
            path.pop();
        } else if let (true, Ok(value)) = (names.contains(&name), value.parse()) {
            found.push(Attribute { module: path.join("."), name: name.into(), value });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::nn::transformer::TransformerEncoderConfig;
    use burn::tensor::Device;

    #[test]
    fn heads_of_every_layer_are_found_by_path() {
        let encoder = TransformerEncoderConfig::new(12, 24, 3, 2).init(&Device::flex());
        let heads = attributes(&encoder, &["n_heads"]);
        let of = |module: &str| heads.iter().find(|heads| heads.module == module).map(|heads| heads.value);
        assert_eq!((of("layers.0.mha"), of("layers.1.mha"), of("layers")), (Some(3), Some(3), None), "{heads:?}");
        assert!(!encoder.layers[0].mha.query.weight.is_initialized());
    }
}
