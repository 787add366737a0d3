//! The safetensors files that come in and go out.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use backend_dist::shard::HostTensor;
use host::partial_file::partial;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, SafeTensors, serialize_to_file};

use super::error::ForwardError;
use super::settings::{Input, Output};
use crate::element::Element;
use crate::refusal::{Access, advice};

/// Reads `input_ids [sequences, seq]` and, if it is there, `labels` of the same shape; 64-bit or 32-bit integers. Fails
/// if the file cannot be read or its tensors are others.
pub fn read_input(path: &Path) -> Result<Input, ForwardError> {
    let refuse = |what: String| ForwardError::Input { path: path.into(), what };
    let bytes = open(path)?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| refuse(error.to_string()))?;
    if file.tensor("pixel_values").is_ok() {
        return Err(refuse("tensor `pixel_values`: this model reads no images; legal: input_ids, labels".into()));
    }
    let ids = file.tensor("input_ids").map_err(|_| refuse("tensor `input_ids` is missing".into()))?;
    let &[sequences, seq] = ids.shape() else {
        return Err(refuse(format!("tensor `input_ids` has shape {:?}, not [sequences, tokens]", ids.shape())));
    };
    if sequences * seq == 0 {
        return Err(refuse(format!("tensor `input_ids` has shape [{sequences}, {seq}]: there is nothing to read")));
    }
    only_pads_the_end(path, &file, ids.shape())?;
    let labels = match file.tensor("labels") {
        Ok(labels) if labels.shape() == ids.shape() => Some(integers(path, "labels", &labels)?),
        Ok(labels) => {
            let (found, needed) = (labels.shape(), ids.shape());
            return Err(refuse(format!("tensor `labels` has shape {found:?}, `input_ids` has {needed:?}")));
        }
        Err(_) => None,
    };
    Ok(Input { sequences, seq, ids: integers(path, "input_ids", &ids)?, labels })
}

/// Refuses an `attention_mask` other than one that hides the last tokens of a sequence, which change nothing before them: a
/// causal model has no other mask.
pub(super) fn only_pads_the_end(path: &Path, file: &SafeTensors, shape: &[usize]) -> Result<(), ForwardError> {
    let Ok(mask) = file.tensor("attention_mask") else { return Ok(()) };
    let refuse = |what: String| ForwardError::Input { path: path.into(), what };
    if mask.shape() != shape {
        let found = mask.shape();
        return Err(refuse(format!("tensor `attention_mask` has shape {found:?}, `input_ids` has {shape:?}")));
    }
    let mask = integers(path, "attention_mask", &mask)?;
    let hides_first = |row: &[i64]| row.windows(2).any(|pair| pair[0] == 0 && pair[1] != 0);
    mask.chunks(shape[1]).position(hides_first).map_or(Ok(()), |sequence| {
        let legal = "legal: padding at the end, whose labels are -100";
        Err(refuse(format!("tensor `attention_mask` hides tokens of sequence {sequence} before others; {legal}")))
    })
}

/// The bytes of a file.
pub(super) fn open(path: &Path) -> Result<Vec<u8>, ForwardError> {
    let what = |error| format!("{error}{}", advice(Access::Read, &error));
    std::fs::read(path).map_err(|error| ForwardError::Input { path: path.into(), what: what(error) })
}

/// A tensor of 64-bit or 32-bit integers.
pub(super) fn integers(path: &Path, name: &str, view: &TensorView) -> Result<Vec<i64>, ForwardError> {
    match view.dtype() {
        Dtype::I64 => Ok(view.data().as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect()),
        Dtype::I32 => {
            Ok(view.data().as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect())
        }
        other => {
            let what = format!("tensor `{name}` has elements of type {other:?}, not I64 or I32");
            Err(ForwardError::Input { path: path.into(), what })
        }
    }
}

/// Writes `logits [sequences, seq, vocab]`, `loss [1]` and `grad.NAME` for every gradient. Fails if the file cannot be
/// written.
pub fn write_output(path: &Path, input: &Input, output: &Output, element: Element) -> Result<(), ForwardError> {
    let mut tensors = vec![("logits".to_string(), vec![input.sequences, input.seq, output.vocab], &output.logits[..])];
    if let Some(loss) = &output.loss {
        tensors.push(("loss".into(), vec![1], std::slice::from_ref(loss)));
    }
    write_tensors(path, tensors, &output.gradients, element)
}

/// Writes tensors, and gradients as `grad.NAME`.
pub(super) fn write_tensors<'a>(
    path: &Path,
    mut tensors: Vec<(String, Vec<usize>, &'a [f64])>,
    gradients: &'a BTreeMap<String, HostTensor>,
    element: Element,
) -> Result<(), ForwardError> {
    for (name, gradient) in gradients {
        tensors.push((format!("grad.{name}"), gradient.shape.clone(), &gradient.data));
    }
    let encoded: Vec<(String, Vec<usize>, Vec<u8>)> = (tensors.into_iter())
        .map(|(name, shape, values)| {
            let mut bytes = Vec::new();
            element.encode(values, &mut bytes);
            (name, shape, bytes)
        })
        .collect();
    let views = encoded
        .iter()
        .map(|(name, shape, bytes)| Ok((name.as_str(), TensorView::new(element.dtype(), shape.clone(), bytes)?)));
    let written = views.collect::<Result<HashMap<_, _>, SafeTensorError>>().and_then(|views| {
        let file = partial(path)?;
        serialize_to_file(views, None, file.path())?;
        file.persist(path).map_err(|error| error.error)?;
        Ok(())
    });
    written.map_err(|source| ForwardError::Output { path: path.into(), source })
}
