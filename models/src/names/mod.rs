//! Global tensors under other systems' names and shapes, both ways.

mod gated_delta;
mod latent;
mod mamba2;

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use backend_dist::shard::HostTensor;
use thiserror::Error;

pub(crate) use gated_delta::without_inputs;
pub(crate) use latent::latent;
pub use layouts::pattern::fits;
pub(crate) use mamba2::mamba2;

/// Whole tensors by their names.
pub type HostTensors = BTreeMap<String, HostTensor>;

/// Where a global tensor is found in another system: in some matrix rows of a tensor, perhaps transposed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// Name of the other system's tensor.
    pub name: String,
    /// The other system stores the transpose of our matrix (`[in, out]`).
    pub transposed: bool,
    /// Which matrix rows (after transposing) are ours, in order; `None` is all of them.
    pub rows: Option<Vec<Range<usize>>>,
    /// The other system's tensor is a stack, of which ours is a part; then `rows` are `None`.
    pub stack: Option<StackPart>,
    /// Shape of the other system's tensor.
    pub shape: Vec<usize>,
}

/// Some rows of one matrix of a stack: all of them, or every second as where gate and up alternate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackPart {
    /// Which matrix, or vector, of the stack.
    pub index: usize,
    /// Its first row (after transposing) that is ours.
    pub first: usize,
    /// From which on every so many rows are.
    pub every: usize,
}

/// One matrix row of ours in the other system's tensor: flat positions at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first position.
    pub start: usize,
    /// Distance of neighbours; 1 unless the other system's matrix is the transpose of ours.
    pub step: usize,
    /// Number of elements.
    pub len: usize,
}

impl Run {
    /// The positions, in order.
    pub fn positions(self) -> impl Iterator<Item = usize> {
        (0..self.len).map(move |index| self.start + index * self.step)
    }
}

/// Why tensors cannot be translated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message of a variant names its fields")]
pub enum NameError {
    /// The other system's checkpoint lacks a tensor.
    #[error("tensor `{name}` is missing")]
    Missing { name: String },
    /// A tensor has another shape than the configuration says.
    #[error("tensor `{name}` is {found:?}, the model's configuration needs {expected:?}")]
    Shape { name: String, found: Vec<usize>, expected: Vec<usize> },
    /// The checkpoint has a tensor that the model does not know.
    #[error("tensor `{name}` is not part of the model")]
    Unknown { name: String },
}

/// Every global tensor of a model with its place in another system.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameMap {
    entries: Vec<(String, Foreign)>,
}

impl NameMap {
    /// Adds a tensor that is the same under another name.
    pub fn same(&mut self, ours: impl Into<String>, theirs: impl Into<String>, shape: &[usize]) {
        self.add(
            ours,
            Foreign { name: theirs.into(), transposed: false, rows: None, stack: None, shape: shape.to_vec() },
        );
    }

    /// Adds a linear layer of shape `[out, in]` that is the same under another name, with its bias if it has one.
    pub fn linear(&mut self, ours: &str, theirs: &str, shape: [usize; 2], bias: bool) {
        self.same(format!("{ours}.weight"), format!("{theirs}.weight"), &shape);
        if bias {
            self.same(format!("{ours}.bias"), format!("{theirs}.bias"), &shape[..1]);
        }
    }

    /// Adds a linear layer that is `rows` of a layer of `shape`, `[out, in]`, and of its bias if it has one.
    pub fn linear_rows(&mut self, ours: &str, theirs: &str, rows: Vec<Range<usize>>, shape: [usize; 2], bias: bool) {
        let foreign = |what: &str, shape: &[usize]| {
            let (name, rows) = (format!("{theirs}.{what}"), Some(rows.clone()));
            Foreign { name, transposed: false, rows, stack: None, shape: shape.to_vec() }
        };
        self.add(format!("{ours}.weight"), foreign("weight", &shape));
        if bias {
            self.add(format!("{ours}.bias"), foreign("bias", &shape[..1]));
        }
    }

    /// Adds a vector or matrix that is a part of a stack of this shape. Of matrices the stack has the transposes.
    pub fn stacked(&mut self, ours: impl Into<String>, theirs: &str, part: StackPart, shape: &[usize]) {
        let (name, transposed) = (theirs.to_string(), shape.len() == 3);
        self.add(ours, Foreign { name, transposed, rows: None, stack: Some(part), shape: shape.to_vec() });
    }

    /// Adds a tensor.
    pub fn add(&mut self, ours: impl Into<String>, theirs: Foreign) {
        self.entries.push((ours.into(), theirs));
    }

    /// All pairs of our name and the other system's place.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Foreign)> {
        self.entries.iter().map(|(ours, theirs)| (ours.as_str(), theirs))
    }

    /// The place of one of our tensors.
    pub fn get(&self, ours: &str) -> Option<&Foreign> {
        self.iter().find(|(name, _)| *name == ours).map(|(_, theirs)| theirs)
    }

    /// Translates another system's tensors into ours.
    ///
    /// # Errors
    /// If one is missing, has a wrong shape, or is unknown.
    pub fn import(&self, theirs: &HostTensors) -> Result<HostTensors, NameError> {
        let known: HashSet<&str> = self.entries.iter().map(|(_, foreign)| foreign.name.as_str()).collect();
        if let Some(name) = theirs.keys().find(|name| !known.contains(name.as_str())) {
            return Err(NameError::Unknown { name: name.clone() });
        }
        let read = |(ours, foreign): &(String, Foreign)| {
            let tensor = theirs.get(&foreign.name).ok_or_else(|| NameError::Missing { name: foreign.name.clone() })?;
            check_shape(&foreign.name, tensor, &foreign.shape)?;
            Ok((ours.clone(), foreign.read(tensor)))
        };
        self.entries.iter().map(read).collect()
    }

    /// Translates our tensors into another system's.
    ///
    /// # Errors
    /// If one is missing, has a wrong shape, or is unknown.
    pub fn export(&self, ours: &HostTensors) -> Result<HostTensors, NameError> {
        let known: HashSet<&str> = self.iter().map(|(name, _)| name).collect();
        if let Some(name) = ours.keys().find(|name| !known.contains(name.as_str())) {
            return Err(NameError::Unknown { name: name.clone() });
        }
        let mut theirs: HostTensors = BTreeMap::new();
        for (name, foreign) in self.iter() {
            let tensor = ours.get(name).ok_or_else(|| NameError::Missing { name: name.to_string() })?;
            check_shape(name, tensor, &foreign.our_shape())?;
            let whole = theirs.entry(foreign.name.clone()).or_insert_with(|| {
                let shape = foreign.shape.clone();
                HostTensor { data: vec![0.0; shape.iter().product()], shape }
            });
            foreign.write(tensor, whole);
        }
        Ok(theirs)
    }
}

/// Whether Hugging Face's module of this name is a router, or the gate of shared experts.
pub fn is_router(theirs: &str) -> bool {
    [".gate", ".mlp.router", ".shared_expert_gate"].iter().any(|end| theirs.ends_with(end))
}

fn check_shape(name: &str, tensor: &HostTensor, expected: &[usize]) -> Result<(), NameError> {
    match tensor.shape == expected {
        true => Ok(()),
        false => {
            let (found, expected) = (tensor.shape.clone(), expected.to_vec());
            Err(NameError::Shape { name: name.to_string(), found, expected })
        }
    }
}

impl Foreign {
    /// A whole tensor of this shape, still without a name.
    pub(crate) fn unnamed(shape: Vec<usize>) -> Self {
        Self { name: String::new(), transposed: false, rows: None, stack: None, shape }
    }

    /// Shape of our tensor.
    pub fn our_shape(&self) -> Vec<usize> {
        let mut shape = self.matrix();
        if self.transposed {
            shape.reverse();
        }
        if let Some(StackPart { every, .. }) = self.stack {
            shape[0] /= every;
        }
        if let Some(rows) = &self.rows {
            shape[0] = rows.iter().map(ExactSizeIterator::len).sum();
        }
        shape
    }

    /// Shape of the other system's tensor, or of one of the stack.
    fn matrix(&self) -> Vec<usize> {
        self.shape[usize::from(self.stack.is_some())..].to_vec()
    }

    fn read(&self, theirs: &HostTensor) -> HostTensor {
        let data = self.positions().map(|at| theirs.data[at]).collect();
        HostTensor { shape: self.our_shape(), data }
    }

    fn write(&self, ours: &HostTensor, theirs: &mut HostTensor) {
        for (value, at) in ours.data.iter().zip(self.positions()) {
            theirs.data[at] = *value;
        }
    }

    /// For each of our elements in row-major order, the flat position in the other system's tensor.
    fn positions(&self) -> impl Iterator<Item = usize> {
        let whole: Vec<Range<usize>> = self.our_shape().into_iter().map(|size| 0..size).collect();
        self.runs(&whole).into_iter().flat_map(|run| run.positions())
    }

    /// Where the matrix rows of a box of our tensor are, in order; `ranges` has one range per dimension.
    ///
    /// # Panics
    /// If the box is not one of a vector or matrix of our shape.
    pub fn runs(&self, ranges: &[Range<usize>]) -> Vec<Run> {
        let shape = self.our_shape();
        let fits = ranges.len() == shape.len() && ranges.iter().zip(&shape).all(|(range, size)| range.end <= *size);
        // A depthwise convolution has one feature in the middle, `[features, 1, kernel]`.
        let flat = shape.len() == 3 && shape[1] == 1 || (1..=2).contains(&shape.len());
        assert!(fits && flat, "{ranges:?} is no box of {shape:?}");
        let columns = ranges[1..].last().cloned().unwrap_or(0..1);
        let matrix = self.matrix();
        let before = self.stack.map_or(0, |part| part.index * matrix.iter().product::<usize>());
        let (row_step, column_step) = if self.transposed { (1, matrix[1]) } else { (matrix[1..].iter().product(), 1) };
        let row = |row: usize| Run {
            start: before + self.their_row(row) * row_step + columns.start * column_step,
            step: column_step,
            len: columns.len(),
        };
        ranges[0].clone().map(row).collect()
    }

    /// The matrix row of the other system's tensor, after transposing, that is our matrix row `row`.
    fn their_row(&self, row: usize) -> usize {
        if let Some(StackPart { first, every, .. }) = self.stack {
            return first + row * every;
        }
        let Some(rows) = &self.rows else { return row };
        let mut left = row;
        for range in rows {
            if left < range.len() {
                return range.start + left;
            }
            left -= range.len();
        }
        panic!("row {row} is not one of {rows:?}")
    }
}

/// What a module of multi-token prediction has besides its block; `called` are other systems' names of the norms of embeddings
/// and hidden states, of the projection, and of the last norm.
pub(crate) fn mtp_module(map: &mut NameMap, ours: &str, theirs: &str, hidden: usize, called: [&str; 4]) {
    let parts = ["enorm", "hnorm", "eh_proj", "shared_head.norm"];
    for (our, their) in parts.into_iter().zip(called) {
        let shape: &[usize] = if our == "eh_proj" { &[hidden, 2 * hidden] } else { &[hidden] };
        map.same(format!("{ours}.{our}.weight"), format!("{theirs}.{their}.weight"), shape);
    }
}

#[cfg(test)]
mod tests;
