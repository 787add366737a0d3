//! The MoE layer.

use backend_dist::mesh::Nearest;
use backend_dist::ops::Residual;
use backend_dist::ops::moe::routing::OrderedCopies;
use backend_dist::ops::moe::{gather_rows, row_multiple};
use backend_dist::ops::tensor_parallel::{gather_from_sequence_parallel_replicated, scatter_to_sequence_parallel};
use burn::module::Module;
use burn::tensor::Tensor;

use super::config::{Dispatcher, MoeConfig};
use super::decide::Tokens;
use super::dispatch::Dispatch;
use super::experts::Experts;
use super::plan::Members;
use super::router::Router;
use super::shared::Shared;
use crate::layers::linear::pad_sequence;
use crate::layers::norm::Norm;
use crate::micro_batch::MicroBatch;
use crate::param::{BuildError, ExpertParallel, ParamBuilder, Result, TensorParallel};

/// `Σ_e p_e expert_e(norm(x)) + shared(norm(x))` over the experts that the router chooses for a token.
///
/// Every rank routes tokens of its own: under sequence parallelism those that it has, else its part of the sequence,
/// which is gathered again after the experts. All ranks that together hold the layer's experts must compute it at the
/// same time, also those without tokens.
#[derive(Module, Debug)]
pub struct MoeLayer {
    router: Router,
    experts: Experts,
    shared: Option<Shared>,
    #[module(skip)]
    dispatch: Dispatch,
    #[module(skip)]
    parallel: TensorParallel,
}

impl MoeLayer {
    /// A layer under the global name `name`, in the layer that [`ParamBuilder::begin`] began.
    ///
    /// # Panics
    /// If the ranks do not divide experts or their features; models check that before.
    pub fn new(params: &mut ParamBuilder, name: &str, config: &MoeConfig) -> Result<Self> {
        config.check()?;
        let shared = match config.shared {
            Some(shared) => Some(Shared::new(params, &format!("{name}.shared_experts"), config, shared)?),
            None => None,
        };
        let router = Router::new(params, &format!("{name}.router"), config)?;
        let experts = Experts::new(params, &format!("{name}.experts"), config)?;
        let place = params.experts().clone();
        let mut together = place.group.size();
        let multiple = row_multiple(params.device()).max(experts.row_multiple());
        if experts.is_fp8() {
            let on_device = router.is_on_device().then_some(config.dispatcher);
            together = fp8_together(&place, params.parallel().size(), on_device)?;
        }
        let ExpertParallel { group, etp, ep, overlap, pieces, .. } = place;
        let rank = group.rank();
        let members = Members { etp: etp.size, ep: ep.size, experts: config.experts, rank, together, piece: [0, 1] };
        // On CPU ranks nothing is overlapped, unless chunks are asked for.
        let overlap = overlap && experts.can_overlap() && (pieces.is_some() || row_multiple(params.device()) > 1);
        let dispatch = Dispatch { group, members, how: config.dispatcher, multiple, overlap, pieces };
        Ok(Self { router, experts, shared, dispatch, parallel: params.parallel().clone() })
    }

    /// `[s, b, hidden]` to the same, or the rank's parts of the sequence to the same.
    pub fn forward(&self, x: impl Into<Residual>, norm: &Norm, batch: &MicroBatch) -> Tensor<3> {
        let x = norm.of_residual(x.into());
        let Some(shared) = &self.shared else { return self.routed(x, batch, || ()).0 };
        if !self.router.is_on_device() {
            let shared = shared.forward(x.clone(), batch);
            return self.routed(x, batch, || ()).0 + shared;
        }
        let input = x.clone();
        let (routed, shared) = self.routed(x, batch, || shared.forward(input, batch));
        routed + shared
    }

    /// [`forward`](Self::forward) of a decode step, `[1, tokens, hidden]` or `[tokens, 1, hidden]`: the host waits for
    /// nothing.
    pub(crate) fn decode(&self, x: impl Into<Residual>, norm: &Norm) -> Tensor<3> {
        let x = norm.of_residual(x.into());
        let [positions, samples, hidden] = x.dims();
        let tokens = x.clone().reshape([positions * samples, hidden]);
        let OrderedCopies { map, slots, probabilities } = self.router.decode(tokens.clone());
        let routed = gather_rows(self.experts.decode(tokens, probabilities, slots), &map.reversed());
        let routed = routed.reshape([positions, samples, hidden]);
        match &self.shared {
            Some(shared) => routed + shared.forward(x, &MicroBatch::default()),
            None => routed,
        }
    }

    /// Whether there are kernels for [`decode`](Self::decode) of so many tokens, and one rank has all of the layer.
    pub(crate) fn decodes(&self, tokens: usize) -> bool {
        let alone = self.dispatch.members.count() == 1 && self.parallel.size() == 1;
        alone && self.router.decodes() && self.experts.decodes(tokens * self.router.top_k())
    }

    /// The routed experts, and the output of `meanwhile`, which runs before the host waits.
    fn routed<T>(&self, x: Tensor<3>, batch: &MicroBatch, meanwhile: impl FnOnce() -> T) -> (Tensor<3>, T) {
        let ([positions, samples, hidden], parallel) = (x.dims(), &self.parallel);
        if parallel.sequence || parallel.size() == 1 {
            return self.own(x, positions * parallel.size(), batch, meanwhile);
        }
        let all = positions.next_multiple_of(parallel.size());
        let own = scatter_to_sequence_parallel(pad_sequence(x, all), &parallel.group);
        let (out, made) = self.own(own, positions, batch, meanwhile);
        let out = gather_from_sequence_parallel_replicated(out, &parallel.group);
        (if all == positions { out } else { out.slice([0..positions, 0..samples, 0..hidden]) }, made)
    }

    /// The routed experts for this rank's own positions; the ranks have `all` positions together.
    fn own<T>(&self, x: Tensor<3>, all: usize, batch: &MicroBatch, meanwhile: impl FnOnce() -> T) -> (Tensor<3>, T) {
        let [positions, samples, hidden] = x.dims();
        let first = self.parallel.group.rank() * positions;
        let x = x.reshape([positions * samples, hidden]);
        let tokens = Tokens::of(first..first + positions, all, samples, batch);
        let (routing, behind, (sent, made)) = self.router.forward(x.clone(), tokens, batch, |choice| {
            let sent = choice.and_then(|choice| self.dispatch.early(x.clone(), choice, &self.experts));
            (sent, meanwhile())
        });
        let out = self.dispatch.through(x, routing, sent, &self.experts, batch);
        let out = self.router.after_experts(out, behind, batch);
        (out.reshape([positions, samples, hidden]), made)
    }
}

/// How many neighbours among the experts' ranks have tokens of one micro-batch: only these share a scale; `on_device`
/// is the dispatcher if experts are chosen on the device.
///
/// # Errors
/// If the tokens of different micro-batches cannot be told apart.
fn fp8_together(place: &ExpertParallel, tp: usize, on_device: Option<Dispatcher>) -> Result<usize> {
    let members = place.group.size();
    let refused = |reason: String| Err(BuildError::Fp8Experts(reason));
    let Some(together) = place.sharing_tokens(tp) else {
        return refused(format!(
            "the {members} ranks that hold a layer's experts (expert-parallel · expert-tensor-parallel) and tensor-parallel \
             {tp} must divide one the other; nearest legal tensor-parallel: {}",
            Nearest::where_legal(tp, members, |tp| members.is_multiple_of(tp))
        ));
    };
    if on_device == Some(Dispatcher::AllGather) && together < members {
        return refused(format!(
            "the all-gather dispatcher on GPUs cannot tell the tokens of the {} micro-batches apart that come to the same \
             experts; take the all-to-all dispatcher",
            members / together
        ));
    }
    Ok(together)
}
