//! Where documents begin in a packed sequence, as masks: neither state nor convolution crosses these borders.

use backend_dist::ops::context::Documents;
use burn::tensor::{Bool, DType, Device, Tensor, TensorData};

use crate::micro_batch::MicroBatch;

/// The first position of the document of each position, by sample.
pub(in crate::layers) struct Borders(Vec<Vec<usize>>);

impl Borders {
    /// Of a micro-batch's sequences, if they have several documents; the rank has `positions` positions of them.
    pub fn of(batch: &MicroBatch, positions: usize) -> Option<Self> {
        let seq = batch.sequence_length(positions);
        batch.documents.as_ref().map(|documents| Self::new(documents, seq))
    }

    /// Of sequences of `seq` positions.
    pub fn new(documents: &Documents, seq: usize) -> Self {
        let of = |sample: usize| {
            let starts = documents.starts(sample);
            (0..seq).map(|at| starts[starts.partition_point(|start| *start <= at) - 1]).collect()
        };
        Self((0..documents.samples()).map(of).collect())
    }

    /// How many positions of the same document are in front of each position: `[s, b]`, in fp32.
    pub fn ages(&self, device: &Device) -> Tensor<2> {
        let (samples, seq) = (self.0.len(), self.0[0].len());
        let ages = (0..seq).flat_map(|at| self.0.iter().map(move |starts| (at - starts[at]) as f32));
        Tensor::from_data(TensorData::new(ages.collect::<Vec<_>>(), [seq, samples]), (device, DType::F32))
    }

    /// Whether two positions of a chunk are of different documents: `[b, 1, chunks, chunk, chunk]`.
    pub fn divides(&self, chunk: usize, device: &Device) -> Tensor<5, Bool> {
        let chunks = self.chunks(chunk);
        let starts = self.0.iter().flat_map(|starts| {
            (0..chunks * chunk).flat_map(move |at| {
                let first = at / chunk * chunk;
                (first..first + chunk).map(move |other| start(starts, at) != start(starts, other))
            })
        });
        let data = TensorData::new(starts.collect::<Vec<bool>>(), [self.0.len(), 1, chunks, chunk, chunk]);
        Tensor::from_data(data, device)
    }

    /// 1 where a position's document began before its chunk, so that it sees the state in front of the chunk, else 0:
    /// `[b, 1, chunks, chunk]`.
    pub fn enters(&self, chunk: usize, like: (&Device, DType)) -> Tensor<4> {
        let chunks = self.chunks(chunk);
        let begins = |at: usize| (at / chunk * chunk).max(1);
        let of = |starts: &Vec<usize>| (0..chunks * chunk).map(|at| start(starts, at) < begins(at)).collect::<Vec<_>>();
        numbers(self.0.iter().flat_map(of), [self.0.len(), 1, chunks, chunk], like)
    }

    fn chunks(&self, chunk: usize) -> usize {
        self.0[0].len().div_ceil(chunk)
    }
}

/// Positions that pad the last chunk belong to the last document.
fn start(starts: &[usize], at: usize) -> usize {
    starts[at.min(starts.len() - 1)]
}

fn numbers<const D: usize>(flags: impl Iterator<Item = bool>, shape: [usize; D], like: (&Device, DType)) -> Tensor<D> {
    let values: Vec<f32> = flags.map(|flag| f32::from(u8::from(flag))).collect();
    Tensor::from_data(TensorData::new(values, shape), like)
}
