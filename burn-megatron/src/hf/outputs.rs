//! The tensors that are written, put together from ours: box by box, never a whole model in memory.

use std::collections::BTreeMap;
use std::ops::Range;

use backend_dist::launch::BoxError;
use models::names::Foreign;

use super::error::HfFolderError;
use crate::element::Element;

/// Bytes of a tensor that are in memory at a time, where it can be read by rows: so few that as f64 their memory is used again for
/// the next ones.
const CHUNK: usize = 4 << 20;

/// Global tensors as they are stored somewhere, by our names.
pub trait TensorReader {
    /// The type of a tensor's elements.
    ///
    /// # Errors
    /// If there is no tensor of this name and shape.
    fn element(&self, name: &str, shape: &[usize]) -> Result<Element, BoxError>;

    /// The bytes of a box of a tensor, row-major.
    ///
    /// # Errors
    /// If there is no tensor of this name and shape, or it cannot be read.
    fn read_bytes(&self, name: &str, shape: &[usize], ranges: &[Range<usize>]) -> Result<Vec<u8>, BoxError>;
}

/// One of the tensors of the other system: its parts by our names.
pub(super) struct Output<'a> {
    pub name: &'a str,
    pub shape: &'a [usize],
    pub element: Element,
    parts: Vec<(&'a str, &'a Foreign)>,
}

impl Output<'_> {
    pub fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.element.size()) as u64
    }

    /// The parts by our names, and where they are in the tensor.
    pub fn parts(&self) -> &[(&str, &Foreign)] {
        &self.parts
    }
}

/// The other system's tensors in the order of the model.
pub(super) fn outputs<'a>(
    names: impl Iterator<Item = (&'a str, &'a Foreign)>,
    element: Option<Element>,
    source: &dyn TensorReader,
) -> Result<Vec<Output<'a>>, HfFolderError> {
    let mut outputs: Vec<Output<'a>> = Vec::new();
    let mut known: BTreeMap<&str, usize> = BTreeMap::new();
    for (ours, foreign) in names {
        let stored = source
            .element(ours, &foreign.our_shape())
            .map_err(|source| HfFolderError::Weight { name: ours.into(), source })?;
        let at = *known.entry(&foreign.name).or_insert_with(|| {
            let (name, shape) = (foreign.name.as_str(), foreign.shape.as_slice());
            outputs.push(Output { name, shape, element: element.unwrap_or(stored), parts: Vec::new() });
            outputs.len() - 1
        });
        outputs[at].parts.push((ours, foreign));
    }
    Ok(outputs)
}

/// Gives the bytes of a tensor, in rows of its first dimension, to `write`.
pub(super) fn write_tensor(
    output: &Output,
    source: &dyn TensorReader,
    mut write: impl FnMut(&[u8]) -> Result<(), HfFolderError>,
) -> Result<(), HfFolderError> {
    let whole: Vec<Range<usize>> = output.shape.iter().map(|size| 0..*size).collect();
    if let [(ours, foreign)] = output.parts.as_slice()
        && !foreign.transposed
        && foreign.rows.is_none()
        && foreign.stack.is_none()
    {
        let row = output.shape[1..].iter().product::<usize>() * output.element.size();
        let rows = (CHUNK / row.max(1)).max(1);
        for first in (0..output.shape[0]).step_by(rows) {
            let mut ranges = whole.clone();
            ranges[0] = first..(first + rows).min(output.shape[0]);
            write(&converted(ours, foreign, &ranges, output.element, source)?)?;
        }
        return Ok(());
    }
    let size = output.element.size();
    let mut bytes = vec![0; output.shape.iter().product::<usize>() * size];
    for (ours, foreign) in &output.parts {
        let ranges: Vec<Range<usize>> = foreign.our_shape().iter().map(|size| 0..*size).collect();
        let part = converted(ours, foreign, &ranges, output.element, source)?;
        let positions = foreign.runs(&ranges).into_iter().flat_map(|run| run.positions());
        for (from, at) in part.chunks_exact(size).zip(positions) {
            bytes[at * size..(at + 1) * size].copy_from_slice(from);
        }
    }
    write(&bytes)
}

/// A box of ours in another type.
fn converted(
    ours: &str,
    foreign: &Foreign,
    ranges: &[Range<usize>],
    element: Element,
    source: &dyn TensorReader,
) -> Result<Vec<u8>, HfFolderError> {
    let read = || -> Result<Vec<u8>, BoxError> {
        let shape = foreign.our_shape();
        let (stored, bytes) = (source.element(ours, &shape)?, source.read_bytes(ours, &shape, ranges)?);
        if stored == element {
            return Ok(bytes);
        }
        let mut converted = Vec::new();
        element.encode_finite(&stored.decode(&bytes), &mut converted)?;
        Ok(converted)
    };
    read().map_err(|source| HfFolderError::Weight { name: ours.into(), source })
}
