//! Which modules an `adapter_config.json` means: names or a regular expression, exceptions, and a choice of layers, as
//! peft's `check_target_module_exists` tells them.

use models::lora::{ALL_LINEAR, LoraConfig, LoraError, modules};
use models::names::NameMap;
use regex::Regex;
use serde_json::Value;

/// The modules that have adapters.
#[derive(Debug)]
pub(super) struct Targets {
    names: Vec<String>,
    /// The last parts of names of parameters, to which exceptions and the choice of layers do not apply.
    parameters: Vec<String>,
    /// In place of names.
    pattern: Option<Regex>,
    except: Option<Except>,
    layers: Option<Layers>,
}

#[derive(Debug)]
enum Except {
    Pattern(Regex),
    Names(Vec<String>),
}

/// Numbers of layers, which follow one of these expressions in a module's name.
#[derive(Debug)]
struct Layers {
    numbers: Vec<u64>,
    before: Vec<Regex>,
}

impl Targets {
    /// Reads the keys of a file.
    ///
    /// # Errors
    /// Names the key that is missing or no expression.
    pub(super) fn read(json: &Value) -> Result<Self, String> {
        let (names, pattern) = match &json["target_modules"] {
            Value::String(word) if word == ALL_LINEAR => (vec![word.clone()], None),
            Value::String(text) => (Vec::new(), Some(whole("target_modules", text)?)),
            Value::Array(list) => (texts(list), None),
            Value::Null if json["target_parameters"].is_array() => (Vec::new(), None),
            _ => return Err("target_modules is missing: the names of modules".into()),
        };
        let parameters = match &json["target_parameters"] {
            Value::Null => Vec::new(),
            Value::Array(list) if list.iter().all(Value::is_string) => texts(list),
            other => return Err(format!("target_parameters = {other} is no list of names of parameters")),
        };
        let except = match &json["exclude_modules"] {
            Value::String(text) => Some(Except::Pattern(whole("exclude_modules", text)?)),
            Value::Array(list) if !list.is_empty() => Some(Except::Names(texts(list))),
            _ => None,
        };
        Ok(Self { names, parameters, pattern, except, layers: Layers::read(json)? })
    }

    /// The last parts of names of parameters.
    pub(super) fn parameters(&self) -> &[String] {
        &self.parameters
    }

    /// The names for [`LoraConfig`], of a model with these names, with those of `parameters`.
    ///
    /// # Errors
    /// If no module is left, or a name is none of a module that can have an adapter.
    pub(super) fn of(&self, names: &NameMap, parameters: &[String]) -> Result<Vec<String>, LoraError> {
        let with_parameters = |modules: Vec<String>| [modules, parameters.to_vec()].concat();
        let alone = self.names.is_empty() && self.pattern.is_none() && !self.parameters.is_empty();
        if alone || self.pattern.is_none() && self.except.is_none() && self.layers.is_none() {
            return Ok(with_parameters(self.names.clone()));
        }
        let named: Vec<String> = match &self.pattern {
            Some(pattern) => {
                let meant = modules(names).into_iter().filter(|module| pattern.is_match(module));
                meant.map(String::from).collect()
            }
            None => {
                let config = LoraConfig { target_modules: self.names.clone(), ..LoraConfig::default() };
                config.plan(names)?.modules().into_keys().map(String::from).collect()
            }
        };
        let is_meant = |module: &String| {
            // The choice of layers does not apply to a module whose whole name is given.
            !self.except.as_ref().is_some_and(|except| except.has(module))
                && (self.names.contains(module) || self.layers.as_ref().is_none_or(|layers| layers.has(module)))
        };
        let left: Vec<String> = named.into_iter().filter(is_meant).collect();
        let asked = || self.pattern.as_ref().map_or_else(|| self.names.join(", "), |pattern| pattern.to_string());
        if left.is_empty() { Err(LoraError::NoTarget { targets: asked() }) } else { Ok(with_parameters(left)) }
    }
}

impl Except {
    fn has(&self, module: &str) -> bool {
        match self {
            Self::Pattern(pattern) => pattern.is_match(module),
            Self::Names(names) => names.iter().any(|name| {
                module.strip_suffix(name.as_str()).is_some_and(|before| before.is_empty() || before.ends_with('.'))
            }),
        }
    }
}

impl Layers {
    fn read(json: &Value) -> Result<Option<Self>, String> {
        let numbers = match &json["layers_to_transform"] {
            Value::Array(list) if list.is_empty() => return Ok(None),
            Value::Array(list) => list.iter().map(Value::as_u64).collect::<Option<Vec<_>>>(),
            Value::Null => return Ok(None),
            one => one.as_u64().map(|number| vec![number]),
        };
        let numbers = numbers.ok_or_else(|| {
            format!("layers_to_transform = {} is no number of a layer, or a list of them", json["layers_to_transform"])
        })?;
        let lists = match &json["layers_pattern"] {
            Value::String(list) if !list.is_empty() => vec![list.clone()],
            Value::Array(lists) if !lists.is_empty() => texts(lists),
            _ => vec![r".*?\.[^.]*".into()],
        };
        let before =
            lists.iter().map(|list| expression("layers_pattern", list, &format!(r"^(?:.*?\.)??{list}\.(\d+)\.")));
        Ok(Some(Self { numbers, before: before.collect::<Result<_, _>>()? }))
    }

    fn has(&self, module: &str) -> bool {
        let found = self.before.iter().find_map(|before| before.captures(module));
        found.and_then(|found| found[1].parse().ok()).is_some_and(|number| self.numbers.contains(&number))
    }
}

fn texts(list: &[Value]) -> Vec<String> {
    list.iter().filter_map(|name| name.as_str().map(String::from)).collect()
}

/// An expression of the whole name.
fn whole(key: &str, text: &str) -> Result<Regex, String> {
    expression(key, text, &format!("^(?:{text})$"))
}

pub(super) fn expression(key: &str, text: &str, whole: &str) -> Result<Regex, String> {
    let refused = |_| format!("{key} = {text} is no regular expression without look-around; legal: that, or names");
    Regex::new(whole).map_err(refused)
}

#[cfg(test)]
mod tests {
    use models::{LlamaConfig, MixtralConfig, MixtralVariant, ModelConfig};
    use serde_json::json;

    use super::*;

    fn chosen(json: Value) -> Vec<String> {
        let config = LlamaConfig { num_hidden_layers: 12, ..LlamaConfig::tiny() };
        all(&Targets::read(&json).unwrap(), &config.hf_names()).unwrap()
    }

    fn all(targets: &Targets, names: &NameMap) -> Result<Vec<String>, LoraError> {
        targets.of(names, targets.parameters())
    }

    #[test]
    fn an_expression_is_of_the_whole_name() {
        let some = chosen(json!({"target_modules": r".*layers\.1\d\..*\.(q|v)_proj"}));
        let of = |layer: usize| ["q", "v"].map(|what| format!("model.layers.{layer}.self_attn.{what}_proj"));
        assert_eq!(some, [of(10), of(11)].concat());
        assert!(Targets::read(&json!({"target_modules": "(?!q)"})).unwrap_err().contains("look-around"));
        let one = json!({"target_modules": "q", "target_parameters": "experts.down_proj"});
        assert!(Targets::read(&one).unwrap_err().contains("is no list of names of parameters"));
    }

    #[test]
    fn exceptions_are_names_or_an_expression() {
        let attention = chosen(json!({"target_modules": "all-linear", "exclude_modules": "model.*mlp.*"}));
        assert!(attention.len() == 4 * 12 && attention.iter().all(|name| name.contains("self_attn")));
        let names =
            json!({"target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj", "layers.0.self_attn.q_proj"]});
        assert!(chosen(names.clone()).iter().all(|name| name.ends_with("q_proj")));
        assert_eq!(chosen(names).len(), 11);
    }

    #[test]
    fn layers_are_chosen_by_number() {
        let of = |key: Value| chosen(json!({"target_modules": ["o_proj"], "layers_to_transform": key}));
        assert_eq!(of(json!(3)), ["model.layers.3.self_attn.o_proj"]);
        assert_eq!(of(json!([0, 11])), ["model.layers.0.self_attn.o_proj", "model.layers.11.self_attn.o_proj"]);
        assert_eq!(of(Value::Null), ["o_proj"]);
        let named = json!({"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": "layers"});
        assert_eq!(chosen(named), ["model.layers.1.self_attn.o_proj"]);
        let whole =
            json!({"target_modules": ["o_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "model.layers"]});
        assert_eq!(chosen(whole), ["model.layers.1.self_attn.o_proj"]);
        let both = json!({"target_modules": ["o_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [1]});
        assert_eq!(chosen(both), ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"]);
    }

    /// The first number in a name is the layer's, a later one an expert's.
    #[test]
    fn layers_of_experts_are_chosen_by_number() {
        let json = json!({"target_modules": ["w1"], "layers_to_transform": [1]});
        let chosen = all(&Targets::read(&json).unwrap(), &MixtralConfig::tiny().hf_names()).unwrap();
        assert_eq!(chosen.len(), MixtralConfig::tiny().num_experts);
        assert!(chosen.iter().all(|name| name.starts_with("model.layers.1.")), "{chosen:?}");
    }

    /// Experts that are one tensor are no modules: an expression does not mean them.
    #[test]
    fn parameters_have_names_of_their_own() {
        let config = MixtralConfig { variant: MixtralVariant::GptOss, ..MixtralConfig::tiny() };
        let chosen = |json: Value| all(&Targets::read(&json).unwrap(), &config.hf_names()).unwrap();
        assert!(chosen(json!({"target_modules": ".*_proj"})).iter().all(|name| name.contains("self_attn")));
        let down = json!({"target_modules": ["q_proj"], "layers_to_transform": [1], "target_parameters": ["experts.down_proj"]});
        assert_eq!(chosen(down), ["model.layers.1.self_attn.q_proj", "experts.down_proj"]);
        for none in [json!([]), Value::Null] {
            let json = json!({"target_modules": none, "target_parameters": ["1.mlp.experts.down_proj"]});
            assert_eq!(chosen(json), ["1.mlp.experts.down_proj"]);
        }
    }

    #[test]
    fn nothing_left_is_an_error() {
        let json = json!({"target_modules": ["o_proj"], "exclude_modules": ["o_proj"]});
        let said = all(&Targets::read(&json).unwrap(), &LlamaConfig::tiny().hf_names()).unwrap_err().to_string();
        assert_eq!(said, "target_modules: `o_proj` leaves no linear layer of this model that has an adapter");
    }
}
