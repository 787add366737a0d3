//! What a teacher says of the sequences of a data set, from a file.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use safetensors::Dtype;
use serde_json::json;
use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use super::sample::{Sample, SampleError, TokenDataset};
use super::top_k::TopK;
use crate::partial_file::partial;
use crate::positioned::PositionedFile;
use crate::safetensors_header::Header;

/// By what a sequence is found: its tokens and where its documents start.
pub fn sequence_key(sample: &Sample) -> i64 {
    let mut hash = Sha256::new();
    sample.tokens.iter().for_each(|token| hash.update(token.to_le_bytes()));
    sample.documents.iter().flatten().for_each(|start| hash.update((*start as u64).to_le_bytes()));
    hash.finalize().first_chunk::<8>().map_or(0, |bytes| i64::from_le_bytes(*bytes))
}

/// A file that is being written, and has its name when it is whole: a safetensors file of `keys [n]`, `ids [n, seq, k]` and `probabilities [n, seq, k + 1]`.
pub struct TopKWriter {
    path: PathBuf,
    file: NamedTempFile,
    start: u64,
    dtype: Dtype,
    sequences: usize,
    seq: usize,
    k: usize,
}

impl TopKWriter {
    /// A file of `sequences` sequences of `seq` tokens, of a teacher of `vocabulary` tokens whose logits were divided by
    /// `temperature`. Probabilities are F64 or else F32.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn create(
        path: &Path,
        [sequences, seq, k]: [usize; 3],
        vocabulary: usize,
        (temperature, dtype): (f64, Dtype),
    ) -> io::Result<Self> {
        let (ids, probabilities) = (sequences * seq * k * 4, sequences * seq * (k + 1) * size(dtype));
        let keys = sequences * 8;
        let header = json!({
            "__metadata__": {"format": "pt", "temperature": temperature.to_string(), "vocabulary": vocabulary.to_string()},
            "keys": {"dtype": "I64", "shape": [sequences], "data_offsets": [0, keys]},
            "ids": {"dtype": "I32", "shape": [sequences, seq, k], "data_offsets": [keys, keys + ids]},
            "probabilities": {"dtype": dtype, "shape": [sequences, seq, k + 1],
                "data_offsets": [keys + ids, keys + ids + probabilities]},
        });
        let mut header = header.to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = partial(path)?;
        let mut writer = BufWriter::new(file.as_file());
        writer.write_all(&(header.len() as u64).to_le_bytes())?;
        writer.write_all(&header)?;
        writer.flush()?;
        drop(writer);
        Ok(Self { path: path.into(), file, start: 8 + header.len() as u64, dtype, sequences, seq, k })
    }

    /// Writes a sequence.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn write(&self, index: usize, key: i64, said: &TopK) -> io::Result<()> {
        let (seq, k, n) = (self.seq as u64, self.k as u64, self.sequences as u64);
        let (at, file) = (index as u64, self.file.as_file());
        let ids: Vec<u8> = said.ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let values = said.probabilities.iter();
        let probabilities: Vec<u8> = match self.dtype {
            Dtype::F64 => values.flat_map(|value| value.to_le_bytes()).collect(),
            _ => values.flat_map(|value| (*value as f32).to_le_bytes()).collect(),
        };
        file.write_all_at(&key.to_le_bytes(), self.start + at * 8)?;
        file.write_all_at(&ids, self.start + n * 8 + at * seq * k * 4)?;
        let values = probabilities.len() as u64;
        file.write_all_at(&probabilities, self.start + n * 8 + n * seq * k * 4 + at * values)
    }

    /// Gives the file its name.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn finish(self) -> io::Result<()> {
        self.file.as_file().sync_all()?;
        self.file.persist(&self.path)?;
        Ok(())
    }
}

/// Bytes of a probability.
fn size(dtype: Dtype) -> usize {
    if dtype == Dtype::F64 { 8 } else { 4 }
}

/// A written file.
#[derive(Debug)]
pub struct TopKFile {
    path: PathBuf,
    file: PositionedFile,
    /// Where `ids` and `probabilities` begin.
    starts: [u64; 2],
    by_key: HashMap<i64, usize>,
    /// Of probabilities.
    dtype: Dtype,
    /// Sequences.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub seq: usize,
    /// Tokens of a position.
    pub k: usize,
    /// What the teacher's logits were divided by.
    pub temperature: f64,
    /// Tokens that the teacher knows.
    pub vocabulary: usize,
}

impl TopKFile {
    /// Opens a file.
    ///
    /// # Errors
    /// Says what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, String> {
        let file = PositionedFile::open(path).map_err(|error| error.to_string())?;
        let header = Header::read(&file).map_err(|_| "is no whole safetensors file".to_string())?;
        let info = |name: &str| header.tensors.info(name).ok_or_else(|| format!("tensor `{name}` is missing"));
        let [keys, ids, probabilities] = [info("keys")?, info("ids")?, info("probabilities")?];
        let &[n, seq, k] = &ids.shape[..] else { return Err(format!("tensor `ids` has shape {:?}", ids.shape)) };
        let types = [keys, ids, probabilities].map(|info| info.dtype);
        let types_fit = types[..2] == [Dtype::I64, Dtype::I32] && [Dtype::F32, Dtype::F64].contains(&types[2]);
        if !types_fit || keys.shape != [n] || probabilities.shape != [n, seq, k + 1] {
            return Err(format!(
                "its tensors are no keys I64 [n], ids I32 [n, seq, k] and probabilities F32 or F64 [n, seq, k + 1], but \
                 {types:?} of {:?}, {:?}, {:?}",
                keys.shape, ids.shape, probabilities.shape
            ));
        }
        let dtype = probabilities.dtype;
        let metadata = header.tensors.metadata().as_ref();
        let said = |key: &str| -> Result<f64, String> {
            let value = metadata.and_then(|metadata| metadata.get(key)?.parse().ok());
            value.ok_or_else(|| format!("its metadata has no `{key}`"))
        };
        let (temperature, vocabulary) = (said("temperature")?, said("vocabulary")? as usize);
        let at = |info: &safetensors::tensor::TensorInfo| header.start + info.data_offsets.0 as u64;
        let bytes = file.read(at(keys), n * 8).map_err(|error| error.to_string())?;
        let keys = bytes.as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
        let by_key = keys.enumerate().map(|(index, key)| (key, index)).collect();
        let starts = [at(ids), at(probabilities)];
        Ok(Self { path: path.into(), file, starts, by_key, dtype, sequences: n, seq, k, temperature, vocabulary })
    }

    /// What the teacher says of a sequence, if the file has it.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn get(&self, key: i64) -> io::Result<Option<TopK>> {
        let Some(&index) = self.by_key.get(&key) else { return Ok(None) };
        let part = |start: u64, each: usize| {
            let bytes = self.seq * each;
            self.file.read(start + (index * bytes) as u64, bytes)
        };
        let ids = part(self.starts[0], self.k * 4)?;
        let ids = ids.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        let bytes = part(self.starts[1], (self.k + 1) * size(self.dtype))?;
        let probabilities = match self.dtype {
            Dtype::F64 => bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
            _ => bytes.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect(),
        };
        Ok(Some(TopK { k: self.k, ids, probabilities }))
    }
}

/// A data set with what a teacher says of it.
pub struct TaughtDataset {
    /// The samples.
    pub data: Arc<dyn TokenDataset>,
    /// The teacher's file.
    pub file: Arc<TopKFile>,
}

impl TaughtDataset {
    /// Whether the file knows the sequences that a run begins with, `count` of them: all, or as many as are read in a
    /// moment, evenly spread over the run.
    ///
    /// # Errors
    /// If it lacks one, or a sample cannot be read.
    pub fn check(&self, count: usize) -> Result<(), SampleError> {
        let tried = count.min(AT_START);
        (0..tried)
            .try_for_each(|at| self.said(&self.data.try_sample(at * count / tried)?, at * count / tried).map(drop))
    }

    fn said(&self, sample: &Sample, index: usize) -> Result<TopK, SampleError> {
        let path = self.file.path.display();
        let missing = || {
            format!(
                "distill.logits = {path} has nothing about sample {index}; write it with the data, seed, number of steps and global \
                 batch of this run"
            )
        };
        Ok(self.file.get(sequence_key(sample))?.ok_or_else(missing)?)
    }
}

/// Samples that are looked up before a run starts.
const AT_START: usize = 4096;

impl TokenDataset for TaughtDataset {
    fn len(&self) -> usize {
        self.data.len()
    }

    fn seq_length(&self) -> usize {
        self.data.seq_length()
    }

    fn sample(&self, index: usize) -> Sample {
        self.try_sample(index).unwrap_or_else(|error| panic!("sample {index}: {error}"))
    }

    fn try_sample(&self, index: usize) -> Result<Sample, SampleError> {
        let mut sample = self.data.try_sample(index)?;
        sample.taught = Some(self.said(&sample, index)?);
        Ok(sample)
    }

    fn untaught(&self, index: usize) -> Result<Sample, SampleError> {
        self.data.untaught(index)
    }

    fn content(&self) -> Result<Option<String>, SampleError> {
        self.data.content()
    }
}
