//! Which parameter is sharded how.

use super::attributes::Attribute;
use super::error::PlanError;
use super::parameters::{Parameter, join};
use super::pattern::{Pattern, nearest};
use crate::logical::Placement::{self, Replicate, Shard};
use ranks::mesh::Axis;
use std::collections::HashMap;

/// How a layer's parameters are sharded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Style {
    /// By output: `weight [in, out]` along dimension 1, a bias with it, the filters of a convolution along dimension 0, of
    /// a transposed one along dimension 1.
    Columns,
    /// As [`Columns`](Self::Columns), within each of so many equal parts.
    ColumnsInParts(usize),
    /// As [`Columns`](Self::Columns), within each of the parts of these sizes.
    ColumnsIn(Vec<usize>),
    /// By input: `weight [in, out]` along dimension 0, the filters of a convolution along dimension 1, of a transposed one
    /// along dimension 0; a bias is whole.
    Rows,
    /// Not at all.
    Replicate,
}

/// Which parameters [`parallelize`](super::parallelize) shards, and how.
///
/// ```
/// use backend_dist::parallelize::Plan;
///
/// // burn-nn's modules by type, layers of one's own by path.
/// let plan = Plan::auto().columns("wq|wk|wv").rows("wo").replicate("embedding");
/// ```
#[derive(Clone, Debug)]
pub struct Plan {
    auto: bool,
    axis: Axis,
    patterns: Vec<(Pattern, Style)>,
    /// How the paths of parameters begin, of which patterns and messages say nothing.
    within: String,
}

impl Default for Plan {
    /// Nothing is sharded.
    fn default() -> Self {
        Self { auto: false, axis: Axis::Tp, patterns: Vec::new(), within: String::new() }
    }
}

impl Plan {
    /// Modules of burn-nn by type, as Megatron-LM shards them: `MultiHeadAttention` and `CrossAttention` (query, key and
    /// value by columns, output by rows), `PositionWiseFeedForward` (inner by columns, outer by rows), `SwiGlu` (both by
    /// columns) and `Embedding` (by rows, which are the vocabulary, where the ranks divide it, else by columns, which are
    /// the features). Other modules stay whole; a `Linear` alone may be
    /// either half of a pair, which its path has to say. The layers of any module with a field `n_heads` or `n_heads_kv` are
    /// only divided between heads.
    pub fn auto() -> Self {
        Self { auto: true, ..Self::default() }
    }

    /// For the module that is this field of a larger one: patterns and messages have its own paths. A pattern `o` would
    /// match everything in a field `model`.
    pub fn within(mut self, field: &str) -> Self {
        self.within = format!("{field}.");
        self
    }

    fn own<'a>(&self, path: &'a str) -> &'a str {
        path.strip_prefix(&self.within).unwrap_or(path)
    }

    /// The axis along which the parameters are sharded instead of tensor parallel.
    pub fn along(mut self, axis: Axis) -> Self {
        self.axis = axis;
        self
    }

    /// Shards by output all parameters whose path, such as `layers.0.mlp.gate.weight`, contains `pattern` or one of its
    /// alternatives, which `|` separates; `*` stands for any characters. Later patterns win over earlier ones, and all
    /// win over types. The adapter of a parameter (Burn's `Lora`, or another reparameterization) follows it.
    pub fn columns(self, pattern: &str) -> Self {
        self.with(pattern, Style::Columns)
    }

    /// [`columns`](Self::columns) within each of so many equal parts of the output, which the model takes apart: query, key
    /// and value of one matrix, or gate and up. Every rank has its share of each.
    ///
    /// What is computed with it is taken apart without a collective: by `chunk`, `split` or `slice` at the ends of parts, or a
    /// `reshape` that makes the parts a dimension. Where it is taken apart otherwise it is gathered, as a
    /// [report](crate::mesh_backend::explain) says. Its value is the model's own, as are its gradient and records.
    pub fn columns_in_parts(self, pattern: &str, parts: usize) -> Self {
        self.with(pattern, Style::ColumnsInParts(parts))
    }

    /// [`columns_in_parts`](Self::columns_in_parts) of these sizes: queries and fewer keys and values of one matrix, or Mamba's
    /// projection, as `columns_in("in_proj", &[inner, inner, state, state, heads])`. At most eight.
    pub fn columns_in(self, pattern: &str, sizes: &[usize]) -> Self {
        self.with(pattern, Style::ColumnsIn(sizes.to_vec()))
    }

    /// Shards by input all parameters whose path matches.
    pub fn rows(self, pattern: &str) -> Self {
        self.with(pattern, Style::Rows)
    }

    /// Leaves all parameters whole whose path matches.
    pub fn replicate(self, pattern: &str) -> Self {
        self.with(pattern, Style::Replicate)
    }

    /// The axis along which parameters are sharded.
    pub fn axis(&self) -> Axis {
        self.axis
    }

    fn with(mut self, pattern: &str, style: Style) -> Self {
        self.patterns.push((Pattern::new(pattern), style));
        self
    }

    /// The placement of each parameter on `ranks` ranks. Those that stay whole are not in the map.
    pub(super) fn placements(
        &self,
        parameters: &[Parameter],
        heads: &[Attribute],
        ranks: usize,
    ) -> Result<HashMap<String, Placement>, PlanError> {
        self.check_patterns(parameters)?;
        let mut placements = HashMap::new();
        // Burn visits a reparameterization right after its parameter.
        let mut adapted: Option<&Parameter> = None;
        for parameter in parameters {
            let path = parameter.path();
            if parameter.is_of_reparameterization() {
                let base = adapted.and_then(|base| Some((base, *placements.get(&base.path())?)));
                let at = base.and_then(|(base, at)| along(&base.shape, at, &parameter.shape));
                placements.extend(at.map(|at| (path, at)));
                continue;
            }
            adapted = Some(parameter);
            let own = self.own(&path);
            let by_path =
                self.patterns.iter().rev().find_map(|(pattern, style)| Some((style.clone(), pattern.matching(own)?)));
            let by_type = || if self.auto { known(parameter, ranks) } else { None };
            let pattern = by_path.as_ref().map(|(_, pattern)| *pattern);
            let Some(style) = by_path.map(|(style, _)| style).or_else(by_type) else { continue };
            let at = style.placement(&parameter.shape, is_transposed(parameter)).ok_or_else(|| PlanError::Rank {
                path: own.into(),
                shape: parameter.shape.clone(),
                style: if style == Style::Rows { "rows" } else { "columns" },
            })?;
            if let Shard(dim) = at {
                let at = match style.parts(parameter.shape[dim]) {
                    None => {
                        self.check_size(own, (&parameter.shape, dim), ranks, pattern)?;
                        at
                    }
                    Some(parts) => self.in_parts(own, (parameter.shape[dim], dim), parts, ranks)?,
                };
                self.check_heads(parameter, heads, ranks)?;
                placements.insert(path, at);
            }
        }
        Ok(placements)
    }

    fn check_patterns(&self, parameters: &[Parameter]) -> Result<(), PlanError> {
        let paths: Vec<String> = parameters.iter().map(|parameter| self.own(&parameter.path()).into()).collect();
        match self.patterns.iter().find_map(|(pattern, _)| pattern.unmatched(&paths)) {
            None => Ok(()),
            Some(unmatched) => Err(PlanError::Unmatched {
                pattern: unmatched.into(),
                nearest: nearest(unmatched, &paths).cloned().unwrap_or_default(),
            }),
        }
    }

    fn check_size(
        &self,
        path: &str,
        (shape, dim): (&[usize], usize),
        ranks: usize,
        pattern: Option<&str>,
    ) -> Result<(), PlanError> {
        let size = shape[dim];
        if Shard(dim).local_shape(shape, ranks).is_some() {
            return Ok(());
        }
        let below = size / ranks * ranks;
        let (path, axis, pattern) = (path.to_string(), self.axis, pattern.map(str::to_string));
        Err(PlanError::Size { path, dim, size, ranks, axis, below: below.max(ranks), above: below + ranks, pattern })
    }

    /// The placement in `parts` of a dimension.
    fn in_parts(
        &self,
        path: &str,
        (size, dim): (usize, usize),
        parts: Vec<usize>,
        ranks: usize,
    ) -> Result<Placement, PlanError> {
        let path = path.to_string();
        let Some(at) = Placement::in_parts(dim, &parts).filter(|_| parts.iter().sum::<usize>() == size) else {
            return Err(PlanError::Parts { path, dim, size, parts });
        };
        match parts.iter().find(|part| !part.is_multiple_of(ranks)) {
            None => Ok(at),
            Some(&part) => {
                let divides = |n: &usize| parts.iter().all(|part| part.is_multiple_of(*n));
                let legal = (1..=part).filter(divides).min_by_key(|n| n.abs_diff(ranks)).unwrap_or(1);
                Err(PlanError::Part { path, dim, part, parts, ranks, axis: self.axis, legal })
            }
        }
    }

    /// A projection of attention may only be divided between heads.
    fn check_heads(&self, parameter: &Parameter, heads: &[Attribute], ranks: usize) -> Result<(), PlanError> {
        // A projection is a layer of the module that shows heads, whatever its type is.
        let module = parameter.fields.len().checked_sub(2).map(|above| join(&parameter.fields[..above]));
        let is_linear = parameter.above(0).is_some_and(|field| field.container == "Linear");
        let of_module = |attribute: &&Attribute| is_linear && module.as_ref() == Some(&attribute.module);
        match heads.iter().filter(of_module).find(|heads| !heads.value.is_multiple_of(ranks)) {
            None => Ok(()),
            Some(attribute) => Err(PlanError::Heads {
                path: self.own(&attribute.module).into(),
                attribute: attribute.name.clone(),
                heads: attribute.value,
                ranks,
                axis: self.axis,
                legal: (1..=attribute.value)
                    .filter(|&n| attribute.value.is_multiple_of(n))
                    .min_by_key(|&n| n.abs_diff(ranks))
                    .unwrap_or(1),
            }),
        }
    }
}

impl Style {
    /// Of a parameter of this shape, which `is_transposed` if a convolution's filters are `[in, out, ..]`.
    fn placement(&self, shape: &[usize], is_transposed: bool) -> Option<Placement> {
        match (self, shape.len()) {
            (Style::Replicate, _) | (Style::Rows, 1) => Some(Replicate),
            (_, 0) => None,
            (Style::Rows, 3..) if is_transposed => Some(Shard(0)),
            (Style::Rows, 3..) => Some(Shard(1)),
            (Style::Rows, _) => Some(Shard(0)),
            (_, 3..) if is_transposed => Some(Shard(1)),
            (_, 2) => Some(Shard(1)),
            _ => Some(Shard(0)),
        }
    }

    /// The parts of an output of `size` elements, if it has some; equal ones are as near to it as can be.
    fn parts(&self, size: usize) -> Option<Vec<usize>> {
        match self {
            Style::ColumnsInParts(parts) => Some(vec![size.div_ceil((*parts).max(1)); *parts]),
            Style::ColumnsIn(sizes) => Some(sizes.clone()),
            _ => None,
        }
    }
}

fn is_transposed(parameter: &Parameter) -> bool {
    parameter.above(0).is_some_and(|field| field.container.starts_with("ConvTranspose"))
}

/// The placement of an adapter's tensor: along the dimension of an adapted matrix `[in, out]` that it has too. A low-rank
/// adapter has `[in, r]`, `[r, out]` and perhaps a magnitude `[out]`.
pub(super) fn along(base: &[usize], at: Placement, shape: &[usize]) -> Option<Placement> {
    match (at.dim()?, base, shape) {
        (dim, [_, _], [_, _]) => (base[dim] == shape[dim]).then_some(at),
        (1, [_, out], [length]) => (out == length).then_some(at.along(0)),
        _ => None,
    }
}

fn is_attention(container: &str) -> bool {
    matches!(container, "MultiHeadAttention" | "CrossAttention")
}

/// How a module of burn-nn is sharded, by the types of a parameter's layer and of the module that has it.
fn known(parameter: &Parameter, ranks: usize) -> Option<Style> {
    let layer = parameter.above(0)?.container.as_str();
    if layer == "Embedding" {
        let divides = parameter.shape.first().is_some_and(|vocabulary| vocabulary.is_multiple_of(ranks));
        return Some(if divides { Style::Rows } else { Style::Columns });
    }
    let field = parameter.above(1).filter(|_| layer == "Linear")?;
    match (field.container.as_str(), field.name.as_str()) {
        (module, "query" | "key" | "value") if is_attention(module) => Some(Style::Columns),
        (module, "output") if is_attention(module) => Some(Style::Rows),
        ("PositionWiseFeedForward", "linear_inner") => Some(Style::Columns),
        ("PositionWiseFeedForward", "linear_outer") => Some(Style::Rows),
        ("SwiGlu", "linear_inner" | "linear_outer") => Some(Style::Columns),
        _ => None,
    }
}
