//! A step over states in host memory, piece by piece.

use super::super::super::flat::{Flat, wide};
use super::super::super::gpu::{Weights, adamw_step};
use super::super::super::rule::Rule;
use super::super::update::Update;
use super::super::{Bucket, MatrixSteps};
use super::{Hosted, Offload, Piece};
use crate::checkpoint::Kind;
use backend_dist::gpu::buffer::{AdamWBuffers, Blocks, Moments, Parameters, adamw};
use burn::module::Module;

impl Bucket {
    /// Puts masters into host memory, once before anything else.
    pub(in super::super) fn host_masters<M: Module>(&self, model: &M, offload: &mut Offload) {
        let Some(hosted) = &self.hosted else { return };
        let Some(weights) = &self.weights else {
            let array = hosted.array(Kind::Master).expect("masters are here");
            return offload.keep(array, &(0..self.region.len()), self.extract(model));
        };
        for piece in hosted.pieces.iter().filter(|_| !self.split) {
            let staged = offload.load(hosted, &piece.range);
            let master = staged.get(Kind::Master).expect("masters are here");
            master.put(0, weights.own().part(piece.range.clone()).tensor());
            offload.store(&staged);
        }
    }

    /// [`Bucket::step`] with states in host memory.
    pub(in super::super) fn step_in_pieces<M: Module>(
        &mut self,
        model: M,
        rule: &Rule,
        hosted: &Hosted,
        offload: &mut Offload,
    ) -> M {
        let model = match self.weights.take() {
            Some(weights) => {
                weights.wait();
                for piece in &hosted.pieces {
                    self.update_on_gpu(piece, &weights, rule, hosted, offload);
                }
                if matches!(self.sharding.zero, 1 | 2) {
                    weights.collective(&self.sharding.shards);
                }
                self.weights = Some(weights);
                model
            }
            None => {
                let device = self.grads.sum().device();
                let mut values = match hosted.has_masters() {
                    true => Flat::zeros(self.region.len(), &device, wide(self.dtype)),
                    false => self.values.take().unwrap_or_else(|| self.extract(&model)),
                };
                for piece in &hosted.pieces {
                    self.update_by_tensors(piece, &mut values, rule, hosted, offload);
                }
                if self.sharding.zero == 3 {
                    self.values = Some(values);
                    model
                } else {
                    self.fill(model, &self.gather(values.into_tensor()))
                }
            }
        };
        self.grads.forget();
        model
    }

    fn update_on_gpu(&self, piece: &Piece, weights: &Weights, rule: &Rule, hosted: &Hosted, offload: &mut Offload) {
        let Rule::AdamW(k) = rule else { unreachable!("only AdamW's states are in host memory") };
        let tensors = piece.tensors.as_ref().expect("pieces on GPUs have a table");
        let here = || piece.range.clone();
        let grad = self.grads.sum().buffer().expect("gradients are in a buffer where weights are").part(here());
        let weight = weights.own().part(here());
        let staged = offload.load(hosted, &piece.range);
        let get = |kind: Kind| staged.get(kind);
        let parameters = match (get(Kind::Master), get(Kind::Remainder)) {
            (Some(master), _) => Parameters::Master { master, weight: &weight },
            (None, Some(remainder)) => Parameters::Split { weight: &weight, remainder },
            (None, None) => Parameters::Wide(&weight),
        };
        let [first, second] = [Kind::FirstMoment, Kind::SecondMoment].map(|kind| get(kind).expect("both are kept"));
        let scales = get(Kind::FirstScale).zip(get(Kind::SecondScale));
        let blocks = scales.map(|scales| {
            [(first, scales.0), (second, scales.1)]
                .map(|(codes, scales)| Blocks { codes: codes.clone(), scales: scales.clone() })
        });
        let moments = match &blocks {
            Some([first, second]) => Moments::Blocks(first, second),
            None => Moments::Floats(first, second),
        };
        adamw(AdamWBuffers { parameters, moments, grad: &grad, tensors }, &adamw_step(k));
        offload.store(&staged);
    }

    fn update_by_tensors(
        &self,
        Piece { range, parts, .. }: &Piece,
        values: &mut Flat,
        rule: &Rule,
        hosted: &Hosted,
        offload: &mut Offload,
    ) {
        let sum = Flat::new(self.grads.sum().part(range.clone()));
        let (device, array) = (sum.device(), |kind| hosted.array(kind));
        let load = |kind| array(kind).map(|array| offload.flat(array, range, &device));
        let mut blocks = hosted.blocks(offload, range);
        let [mut first, mut second] = match &blocks {
            Some(blocks) => blocks.each_ref().map(|moment| Some(moment.widen(&device))),
            None => [Kind::FirstMoment, Kind::SecondMoment].map(load),
        };
        let mut own = load(Kind::Master).unwrap_or_else(|| Flat::new(values.part(range.clone())));
        let second_at: Vec<_> = parts.iter().map(|part| Some(part.at)).collect();
        let matrices = MatrixSteps::default();
        let mut update = Update {
            layout: &self.layout,
            parts,
            second_at: &second_at,
            first: first.as_mut(),
            second: second.as_mut(),
            sum: &sum,
            rule,
            matrices: &matrices,
        };
        for (index, part) in parts.iter().enumerate() {
            update.part(index, &mut own, part.at);
        }
        values.put(range.start, own.part(0..range.len()));
        let moments = [(Kind::FirstMoment, first), (Kind::SecondMoment, second)];
        match &mut blocks {
            Some(blocks) => {
                for (blocks, (_, moment)) in blocks.iter_mut().zip(&moments) {
                    blocks.keep(moment.as_ref().expect("it was widened"));
                }
                hosted.keep_blocks(offload, range.start, blocks);
            }
            None => {
                for (kind, moment) in moments {
                    keep(offload, hosted, kind, range, moment);
                }
            }
        }
        keep(offload, hosted, Kind::Master, range, Some(own));
    }
}

fn keep(offload: &mut Offload, hosted: &Hosted, kind: Kind, range: &std::ops::Range<usize>, values: Option<Flat>) {
    if let (Some(array), Some(values)) = (hosted.array(kind), values) {
        offload.keep(array, range, values);
    }
}
