//! An opened DCP folder: tensors that are read at their positions.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::metadata::{Entry, METADATA, Metadata};
use super::pieces::pieces;
use super::{DcpError, archive, flattened};
use crate::boxes::len;
use crate::positioned::{PositionedFile, Run};
use crate::refusal::{Access, advice};

/// A box of a tensor in a file, row-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Where it is in the tensor.
    pub ranges: Vec<Range<usize>>,
    /// Which of the folder's files.
    pub file: usize,
    /// Where its elements begin.
    pub start: u64,
}

/// A tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DcpTensor {
    /// Type of its elements.
    pub dtype: Dtype,
    /// Its size.
    pub shape: Vec<usize>,
    /// The boxes that make it up.
    pub chunks: Vec<Chunk>,
}

impl DcpTensor {
    /// One of the tensors that this one is a stack of: what is at `index` of its first dimension.
    pub fn part(&self, index: usize) -> Self {
        let size = self.dtype.bitsize() / 8;
        let holds = |chunk: &&Chunk| chunk.ranges[0].contains(&index);
        let chunk = |Chunk { ranges, file, start }: &Chunk| {
            let skipped = (index - ranges[0].start) * len(&ranges[1..]) * size;
            Chunk { ranges: ranges[1..].to_vec(), file: *file, start: start + skipped as u64 }
        };
        let chunks = self.chunks.iter().filter(holds).map(chunk).collect();
        Self { dtype: self.dtype, shape: self.shape[1..].to_vec(), chunks }
    }

    /// The first `rows` of the first dimension.
    pub fn truncated(mut self, rows: usize) -> Self {
        self.shape[0] = rows;
        self.chunks.retain(|chunk| chunk.ranges[0].start < rows);
        self.chunks.iter_mut().for_each(|chunk| chunk.ranges[0].end = chunk.ranges[0].end.min(rows));
        self
    }
}

/// The tensors of a folder that were asked for, by name.
#[derive(Debug)]
pub struct DcpFolder {
    /// The file that describes them.
    pub metadata: PathBuf,
    /// By name.
    pub tensors: BTreeMap<String, DcpTensor>,
    files: Vec<(String, PositionedFile)>,
}

impl DcpFolder {
    /// Whether a folder is one of DCP.
    pub fn is_one(folder: &Path) -> bool {
        folder.join(METADATA).is_file()
    }

    /// Opens a folder, and every archive of the tensors that `choose` takes of all names. It gives each a name to have
    /// here.
    ///
    /// # Errors
    /// If the metadata or an archive is damaged or not as DCP writes it; the message names file and tensor.
    pub fn open(folder: &Path, choose: impl FnOnce(&[&str]) -> HashMap<String, String>) -> Result<Self, DcpError> {
        let metadata = Metadata::read(folder)?;
        let chosen = choose(&metadata.names()?);
        let shapes = metadata.flattened();
        let (mut files, mut tensors): (Vec<(String, PositionedFile)>, _) = (Vec::new(), BTreeMap::new());
        let mut known: HashMap<String, usize> = HashMap::new();
        for (name, Entry { dtype, shape, places }) in metadata.entries(|name| chosen.contains_key(name))? {
            let mut chunks = Vec::with_capacity(places.len());
            for place in places {
                let path = folder.join(&place.file);
                let wrong = |what: String| DcpError::tensor(&path, &name, what);
                let file = match known.get(&place.file) {
                    Some(file) => *file,
                    None => {
                        let refused = |error| wrong(format!("cannot be read: {error}{}", advice(Access::Read, &error)));
                        files.push((place.file.clone(), PositionedFile::open(&path).map_err(refused)?));
                        known.insert(place.file, files.len() - 1);
                        files.len() - 1
                    }
                };
                let sizes: Vec<usize> = place.ranges.iter().map(ExactSizeIterator::len).collect();
                let at = [place.offset, place.length];
                let mut start = archive::elements(&files[file].1, at, &sizes, dtype).map_err(wrong)?;
                let boxes = match shapes.get(name.as_str()) {
                    Some(whole) => flattened::boxes(whole, &shape, &place.ranges).map_err(wrong)?,
                    None => vec![place.ranges],
                };
                for ranges in boxes {
                    let bytes = len(&ranges) * dtype.bitsize() / 8;
                    chunks.push(Chunk { ranges, file, start });
                    start += bytes as u64;
                }
            }
            let shape = shapes.get(name.as_str()).cloned().unwrap_or(shape);
            tensors.insert(chosen[&name].clone(), DcpTensor { dtype, shape, chunks });
        }
        Ok(Self { metadata: metadata.path, tensors, files })
    }

    /// Reads runs of a tensor's bytes, counted row-major, to where they belong in `to`, in ascending order there. Only
    /// what is asked for is read.
    pub fn read_runs(&self, tensor: &DcpTensor, runs: impl Iterator<Item = Run>, to: &mut [u8]) -> io::Result<()> {
        let size = tensor.dtype.bitsize() / 8;
        let boxes: Vec<&[Range<usize>]> = tensor.chunks.iter().map(|chunk| &chunk.ranges[..]).collect();
        let mut of_chunk: Vec<Vec<Run>> = vec![Vec::new(); boxes.len()];
        for run in runs {
            let mut at = run.to;
            for piece in pieces(&tensor.shape, &boxes, run.from / size..(run.from + run.bytes) / size) {
                let bytes = piece.len * size;
                of_chunk[piece.chunk].push(Run { from: piece.from * size, to: at, bytes });
                at += bytes;
            }
        }
        for (chunk, runs) in tensor.chunks.iter().zip(of_chunk).filter(|(_, runs)| !runs.is_empty()) {
            let (name, file) = &self.files[chunk.file];
            let named = |error: io::Error| io::Error::new(error.kind(), format!("{name}: {error}"));
            file.read_runs(chunk.start, runs.into_iter(), to).map_err(named)?;
        }
        Ok(())
    }
}
