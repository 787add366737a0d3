//! Where documents begin in a packed sequence, as ages: neither state nor convolution crosses these borders.

use backend_dist::ops::context::Documents;
use burn::tensor::{DType, Device, Tensor, TensorData};

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
}
