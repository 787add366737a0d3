//! Writes a folder whose linear layers have few bits, as compressed-tensors stores them and transformers and vLLM read
//! them.

use std::cell::LazyCell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use backend_dist::launch::BoxError;
use models::ModelConfig;
use models::names::is_router;
use rayon::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensorError, serialize_to_file};
use serde_json::{Map, Value, json};

use super::error::HfFolderError;
use super::outputs::{Output, TensorReader, outputs, write_tensor};
use super::shards::{divide, name as shard_name};
use super::writer::{Export, config_json, new_folder, refuse_full, write_index, write_small_files};
use crate::element::Element;
use crate::quantise::{Factor, Grid, Quantised, Scheme, pack, packed_len, quantise};

/// Who knows what linear layers read, by our names of them.
pub trait Rounding {
    /// The factor of a layer's inputs; `None` where the nearest numbers must do. Layers are asked for in the order of the
    /// model.
    ///
    /// # Errors
    /// If it cannot be computed.
    fn factor(&mut self, layer: &str) -> Result<Option<Arc<Factor>>, BoxError>;

    /// The values that a weight has from now on, for who wants them.
    fn rounded(&mut self, weight: &str, values: &dyn Fn() -> Vec<f64>);
}

/// Every weight becomes the nearest number.
#[derive(Clone, Copy, Debug, Default)]
pub struct Nearest;

impl Rounding for Nearest {
    fn factor(&mut self, _: &str) -> Result<Option<Arc<Factor>>, BoxError> {
        Ok(None)
    }

    fn rounded(&mut self, _: &str, _: &dyn Fn() -> Vec<f64>) {}
}

/// What was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compressed {
    /// Files of weights.
    pub files: usize,
    /// Bytes of all tensors.
    pub bytes: u64,
    /// Matrices of linear layers in few bits.
    pub matrices: usize,
    /// Of these, those that were quantised with the factor of their inputs.
    pub calibrated: usize,
}

/// A tensor of a file.
type Entry = (String, Dtype, Vec<usize>, Vec<u8>);

/// Hugging Face's matrices of a model that few bits are for, and their inputs: those of linear layers but the output layer
/// and routers.
pub fn linear_inputs(config: &impl ModelConfig) -> Vec<(String, usize)> {
    let names = config.hf_names();
    let mut matrices: Vec<(String, usize)> = Vec::new();
    for (_, foreign) in names.iter().filter(|(ours, foreign)| is_linear(ours, foreign) == Some(true)) {
        if matrices.iter().all(|(name, _)| *name != foreign.name) {
            matrices.push((foreign.name.clone(), foreign.shape[1]));
        }
    }
    matrices
}

/// Whether a tensor is the matrix of a linear layer (`torch.nn.Linear`), and then whether it gets few bits.
fn is_linear(ours: &str, foreign: &models::names::Foreign) -> Option<bool> {
    let module = foreign.name.strip_suffix(".weight")?;
    let is_matrix = foreign.shape.len() == 2 && !foreign.transposed && foreign.stack.is_none();
    let is_table = ours.contains("embed") || ours.ends_with("positions.weight");
    (is_matrix && !is_table).then(|| module != "lm_head" && !is_router(module))
}

/// Writes `folder`, which must not exist or be empty, with the linear layers of `what` quantised.
///
/// # Errors
/// If a weight cannot be read, groups do not divide a layer's inputs, or the disk says no.
pub fn export_compressed(
    folder: &Path,
    what: &Export,
    source: &dyn TensorReader,
    scheme: Scheme,
    rounding: &mut dyn Rounding,
) -> Result<Compressed, HfFolderError> {
    refuse_full(folder)?;
    let names = what.config.hf_names();
    let outputs = outputs(names.iter(), what.element, source)?;
    let mut config = config_json(folder, what, &outputs)?;
    let of = |output: &Output| output.parts().first().and_then(|(ours, foreign)| is_linear(ours, foreign));
    let mut ignore: Vec<&str> = outputs.iter().filter(|output| of(output) == Some(false)).map(|o| o.name).collect();
    ignore.push("lm_head.weight");
    ignore.dedup();
    config["quantization_config"] = quantization_config(scheme, &ignore);
    let sizes: Vec<u64> = outputs.iter().map(|output| size(output, scheme, of(output) == Some(true))).collect();
    new_folder(folder, |partial| {
        let files = divide(&sizes, what.shard_bytes);
        let mut written = Compressed { files: files.len(), ..Compressed::default() };
        let mut shard_of = Map::new();
        for (index, file) in files.iter().enumerate() {
            let mut entries: Vec<Entry> = Vec::new();
            for output in &outputs[file.clone()] {
                let mut bytes = Vec::new();
                write_tensor(output, source, |part| {
                    bytes.extend_from_slice(part);
                    Ok(())
                })?;
                if of(output) != Some(true) {
                    entries.push((output.name.into(), output.element.dtype(), output.shape.to_vec(), bytes));
                    continue;
                }
                let layer = output.parts()[0].0.trim_end_matches(".weight");
                let wrong = |source| HfFolderError::Weight { name: layer.into(), source };
                let factor = rounding.factor(layer).map_err(wrong)?;
                written.matrices += 1;
                written.calibrated += usize::from(factor.is_some());
                let (columns, weight) = (output.shape[1], output.element.decode(&bytes));
                let scale = |scale| stored(scale, output.element);
                let matrix = quantise(&weight, columns, scheme, scale, factor.as_deref());
                let values = LazyCell::new(|| matrix.values(scheme, columns));
                for (ours, foreign) in output.parts() {
                    let whole: Vec<_> = foreign.our_shape().iter().map(|size| 0..*size).collect();
                    let own = || foreign.runs(&whole).into_iter().flat_map(|run| run.positions());
                    rounding.rounded(ours, &|| own().map(|at| values[at]).collect());
                }
                drop(values);
                entries.extend(few_bits(output, matrix, scheme));
            }
            let name = shard_name(index, files.len());
            shard_of.extend(entries.iter().map(|(tensor, ..)| (tensor.clone(), json!(name))));
            written.bytes += entries.iter().map(|(.., bytes)| bytes.len() as u64).sum::<u64>();
            write_file(&partial.join(&name), &entries)?;
        }
        if files.len() > 1 {
            write_index(partial, written.bytes, shard_of)?;
        }
        write_small_files(partial, what, &config)?;
        Ok(written)
    })
}

/// Bytes that a tensor takes, without the shape of what is packed.
fn size(output: &Output, scheme: Scheme, quantised: bool) -> u64 {
    if !quantised {
        return output.bytes();
    }
    let (rows, columns) = (output.shape[0], output.shape[1]);
    let bits = if let Grid::Int { bits } = scheme.grid { bits } else { 8 };
    (rows * (columns * bits / 8 + scheme.groups(columns) * output.element.size())) as u64
}

/// The tensors of a matrix: FP8 stays a matrix of bytes, integers become words.
fn few_bits(output: &Output, matrix: Quantised, scheme: Scheme) -> Vec<Entry> {
    let (rows, columns, element) = (output.shape[0], output.shape[1], output.element);
    let mut scales = Vec::new();
    element.encode(&matrix.scales, &mut scales);
    let name = |part: &str| format!("{}{part}", output.name);
    let scales = (name("_scale"), element.dtype(), vec![rows, scheme.groups(columns)], scales);
    let Grid::Int { bits } = scheme.grid else {
        return vec![(name(""), Dtype::F8_E4M3, vec![rows, columns], matrix.codes), scales];
    };
    let length = packed_len(columns, bits);
    let mut words = vec![0u32; rows * length];
    let of_row = |(to, row): (&mut [u32], &[u8])| to.iter_mut().zip(pack(row, bits)).for_each(|(to, word)| *to = word);
    words.par_chunks_exact_mut(length).zip(matrix.codes.par_chunks_exact(columns)).for_each(of_row);
    let shape: Vec<u8> = output.shape.iter().flat_map(|size| (*size as i64).to_le_bytes()).collect();
    let packed = (name("_packed"), Dtype::I32, vec![rows, length], bytemuck::cast_slice(&words).to_vec());
    vec![packed, scales, (name("_shape"), Dtype::I64, vec![2], shape)]
}

/// A number as it is stored.
fn stored(value: f64, element: Element) -> f64 {
    let mut bytes = Vec::with_capacity(8);
    element.encode(&[value], &mut bytes);
    element.decode(&bytes)[0]
}

/// `quantization_config` of `config.json` (`QuantizationConfig` of compressed-tensors); `format` is what
/// `infer_module_format` says to weights without quantised activations.
fn quantization_config(scheme: Scheme, ignore: &[&str]) -> Value {
    let (bits, kind, format) = match scheme.grid {
        Grid::Fp8 => (8, "float", "naive-quantized"),
        Grid::Int { bits } => (bits, "int", "pack-quantized"),
    };
    let strategy = if scheme.group.is_some() { "group" } else { "channel" };
    let ignore: Vec<&str> = ignore.iter().map(|name| name.trim_end_matches(".weight")).collect();
    json!({
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "global_compression_ratio": null,
        "kv_cache_scheme": null,
        "ignore": ignore,
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "input_activations": null,
            "output_activations": null,
            "weights": {
                "num_bits": bits,
                "type": kind,
                "symmetric": true,
                "strategy": strategy,
                "group_size": scheme.group,
                "block_structure": null,
                "dynamic": false,
                "actorder": null,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }},
    })
}

fn write_file(path: &Path, entries: &[Entry]) -> Result<(), HfFolderError> {
    let views = entries
        .iter()
        .map(|(name, dtype, shape, bytes)| Ok((name.as_str(), TensorView::new(*dtype, shape.clone(), bytes)?)));
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    let written = views
        .collect::<Result<HashMap<_, _>, SafeTensorError>>()
        .and_then(|views| serialize_to_file(views, Some(metadata), path));
    written.map_err(|error| HfFolderError::file(path, error.to_string()))
}
