//! Which parameters are gathered together.

use std::collections::{HashMap, HashSet};

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization};
use burn::tensor::Tensor;

use super::{Sharded, running_states};
use crate::local::Placements;
use crate::paths::PathVisitor;

/// Parameters with fewer elements stay whole on every rank unless [`Units::keep_below`] says otherwise.
const KEEP_BELOW: usize = 10_000;

/// Which parameters of a module are gathered together, and which are not sharded at all.
///
/// A unit is a part of the module: while one computes, the values of the next come.
///
/// ```
/// use backend_dist::fully_shard::Units;
///
/// // `transformer.layers.0`, `transformer.layers.1`, … are units, and so is the rest.
/// let units = Units::by_path("transformer.layers.*").keep_below(4096);
/// assert_eq!(units.of("transformer.layers.12.mha.query.weight"), "transformer.layers.12");
/// assert_eq!(units.of("embedding.weight"), "");
/// // Without a pattern: every element of a list, else every field of the module.
/// assert_eq!(Units::auto().of("transformer.layers.12.mha.query.weight"), "transformer.layers.12");
/// assert_eq!(Units::auto().of("embedding.weight"), "embedding");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Units {
    pattern: Option<Vec<String>>,
    keep_below: usize,
}

impl Units {
    /// Every element of a list of modules is a unit, and every other field of the module.
    pub fn auto() -> Self {
        Self { pattern: None, keep_below: KEEP_BELOW }
    }

    /// Every path that `pattern` matches is a unit; `*` stands for one name. All other parameters are one more unit.
    pub fn by_path(pattern: &str) -> Self {
        Self { pattern: Some(pattern.split('.').map(str::to_string).collect()), keep_below: KEEP_BELOW }
    }

    /// Parameters with fewer than `elements` elements stay whole on every rank (10,000 unless it is called).
    pub fn keep_below(mut self, elements: usize) -> Self {
        self.keep_below = elements;
        self
    }

    /// The unit of the parameter at `path`.
    pub fn of<'a>(&self, path: &'a str) -> &'a str {
        let names: Vec<&str> = path.split('.').collect();
        let length = match &self.pattern {
            Some(pattern) => {
                let matches = names.len() >= pattern.len()
                    && pattern.iter().zip(&names).all(|(pattern, name)| pattern == "*" || pattern == name);
                if matches { pattern.len() } else { 0 }
            }
            None => names.iter().position(|name| name.parse::<usize>().is_ok()).map_or(1, |index| index + 1),
        };
        let end = names[..length].iter().map(|name| name.len() + 1).sum::<usize>();
        &path[..end.saturating_sub(1)]
    }
}

impl Default for Units {
    fn default() -> Self {
        Self::auto()
    }
}

/// The parameters of a module that are sharded, in the order in which the module visits them.
pub(super) struct Find<'a> {
    units: &'a Units,
    of: &'a dyn Fn(ParamId) -> bool,
    /// Running states, of which every rank has its own, and parameters to which nothing can be attached.
    whole: HashSet<ParamId>,
    names: Vec<String>,
    pub params: Vec<Found>,
    /// Where they are, as indices of `params`. A parameter that a module holds in several fields is as many of them: after a
    /// step of Burn's optimizers, which is the first field's, they have values of their own.
    pub paths: HashMap<String, usize>,
}

pub(super) struct Found {
    pub id: ParamId,
    /// Number of the unit, in order of first appearance.
    pub unit: usize,
    pub length: usize,
    /// Whether it has more than one dimension.
    pub is_matrix: bool,
    /// Elements that a rank has of it when it is gathered: fewer on a logical device that shards it.
    pub local: usize,
}

impl<'a> Find<'a> {
    /// What there is to shard of the parameters `of` in `module`.
    pub fn of<M: Module>(module: &M, units: &'a Units, of: &'a dyn Fn(ParamId) -> bool) -> Self {
        let mut whole = running_states(module);
        whole.extend(Reparameterized::of(module).ids);
        let (names, params, paths) = (Vec::new(), Vec::new(), HashMap::new());
        Self { units, of, whole, names, params, paths }.walk(module)
    }
}

impl PathVisitor for Find<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let length = param.lazy_shape().num_elements();
        // A tensor without elements has nothing to share out.
        let is_small = length < self.units.keep_below.max(1) || D == 0;
        if is_small || self.whole.contains(&param.id) || !(self.of)(param.id) {
            return;
        }
        self.paths.insert(path.to_string(), self.params.len());
        let name = self.units.of(path);
        let known = self.names.iter().position(|known| known == name);
        let unit = known.unwrap_or_else(|| {
            self.names.push(name.to_string());
            self.names.len() - 1
        });
        let local = match param.is_initialized() {
            true => Placements::of(&param.base()).local_shape(param.lazy_shape()).num_elements(),
            false => length,
        };
        self.params.push(Found { id: param.id, unit, length, is_matrix: D > 1, local });
    }
}

/// The parameters that have a reparameterization of the module's own, as Burn's `Lora`. A parameter has one, and Burn puts
/// the old one back over what is attached.
#[derive(Default)]
pub(super) struct Reparameterized {
    ids: HashSet<ParamId>,
    /// Where one of them is that requires gradients.
    pub trained: Option<String>,
    path: Vec<String>,
    /// The parameter visited last, and whether it requires gradients.
    last: Option<(ParamId, bool)>,
}

impl Reparameterized {
    pub fn of<M: Module>(module: &M) -> Self {
        let mut found = Self::default();
        module.visit(&mut found);
        found
    }
}

impl ModuleVisitor for Reparameterized {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        // Burn visits a reparameterization right after its parameter.
        if container_type == "Reparameterization"
            && name != Sharded::NAME
            && let Some((id, is_trained)) = self.last
        {
            self.ids.insert(id);
            if is_trained {
                self.trained.get_or_insert_with(|| self.path.join("."));
            }
        }
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.last = Some((param.id, param.is_require_grad()));
    }
}
