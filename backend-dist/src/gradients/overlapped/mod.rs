//! Gradients that are reduced while the backward pass continues, as PyTorch's `DistributedDataParallel` and Megatron-LM's
//! `--overlap-grad-reduce` do, for any Burn module.
//!
//! A [`Reparameterization`] of each parameter sees its gradient right after the backward step that completes it, if the
//! forward pass took the parameter's value where it used it; of a pass that takes all values at its start, some only at the
//! end. Buckets of gradients start to be reduced when their last gradient is there, in an order that all ranks share: in
//! the first pass from the last parameter to the first, then in the order of the first pass. Between GPUs they travel on a
//! stream of their own. Nothing is gained on CPU ranks, which meet in each collective, and on logical devices, where
//! reductions are in the stream of the other operations.
//!
//! The sum of three or more gradients of one activation may be taken in another order than without a [`Reducer`].
//!
//! [`Reparameterization`]: burn::module::Reparameterization

mod buckets;
mod hook;
mod reducing;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use burn::module::{Module, Param, ParamId, Reparameterizer};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::flat::{put_back, take};
use crate::local::Placements;
use crate::paths::PathVisitor;
use buckets::Reduced;
use hook::{Hook, Hooked};
use ranks::comm::Group;
pub use reducing::Counts;
use reducing::{Field, Reducing};

/// Bytes of a bucket unless others are given, as `bucket_cap_mb` of PyTorch's `DistributedDataParallel`.
pub const BUCKET: usize = 25 << 20;

/// Reduces the gradients of a module during its backward pass.
///
/// ```
/// use backend_dist::{gradients::overlapped::Reducer, launch::launch, mesh::{Axis, Mesh}};
/// use burn::nn::LinearConfig;
/// use burn::optim::GradientsParams;
/// use burn::prelude::*;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(4, 3).with_bias(false).init(&device);
/// let ranks = launch(&Mesh::new("DP2".parse()?)?, &[Device::flex()], |rank| {
///     // Every rank gets the means.
///     let reducer = Reducer::new(&model, &rank.group(Axis::Dp), |_| None);
///     let model = reducer.attach(model.clone().fork(&device));
///     reducer.begin_pass(&model, GradientsParams::new());
///     let x = Tensor::<2>::ones([1, 4], &device) * (1.0 + 2.0 * rank.rank as f64);
///     let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
///     let grads = reducer.end_pass(&model, grads);
///     Ok(grads.get::<2>(model.weight.id).expect("the weight was used").into_data())
/// })?;
/// for grad in ranks {
///     assert_eq!(grad.try_to_vec::<f32>()?, [2.0; 12]);
/// }
/// # Ok::<(), backend_dist::launch::BoxError>(())
/// ```
#[derive(Clone)]
pub struct Reducer {
    /// By path: a parameter takes the id of a record that it loads.
    fields: Arc<HashMap<String, Field>>,
    reducing: Arc<Reducing>,
}

impl Reducer {
    /// For clones of `module` on the members of `group`. `owner` says which member gets the mean of a parameter's
    /// gradients; with `None` all do.
    pub fn new<M: Module>(module: &M, group: &Group, owner: impl Fn(ParamId) -> Option<usize>) -> Self {
        Self::with_buckets(module, group, owner, BUCKET)
    }

    /// [`new`](Self::new) with buckets of so many bytes.
    pub fn with_buckets<M: Module>(
        module: &M,
        group: &Group,
        owner: impl Fn(ParamId) -> Option<usize>,
        bytes: usize,
    ) -> Self {
        Self::of_some(module, group, owner, |_| true, bytes)
    }

    /// [`with_buckets`](Self::with_buckets) of the trained parameters `of`; nobody reduces the gradients of others.
    pub fn of_some<M: Module>(
        module: &M,
        group: &Group,
        owner: impl Fn(ParamId) -> Option<usize>,
        of: impl Fn(ParamId) -> bool,
        bytes: usize,
    ) -> Self {
        let trained = Trained::of(&of).walk(module);
        let params = take(module, &mut GradientsParams::new(), |id| trained.ids.contains(&id));
        let params =
            params.iter().map(|param| Reduced { owner: owner(param.id), dtype: param.dtype, length: param.length });
        let reducing = Reducing::new(trained.paths, params.collect(), group.clone(), bytes);
        Self { fields: trained.fields.into(), reducing: reducing.into() }
    }

    /// `module`, whose trained parameters' gradients are reduced from [`begin_pass`](Self::begin_pass) to
    /// [`end_pass`](Self::end_pass). What Burn's autodiff gives then has no gradients of them.
    pub fn attach<M: Module>(&self, module: M) -> M {
        module.apply_reparameterization(self.clone())
    }

    /// Begins a forward pass and the one backward pass that follows; their gradients are added to `earlier`, of micro-batches
    /// before. Every rank must call it.
    ///
    /// The order is `begin_pass`, the forward pass, the backward pass, [`end_pass`](Self::end_pass). If passes of others run
    /// between them, as in a pipeline, it is `begin_pass`, the forward pass, [`pause`](Self::pause),
    /// [`resume`](Self::resume), the backward pass, `pause`, `end_pass`.
    pub fn begin_pass<M: Module>(&self, module: &M, mut earlier: GradientsParams) {
        let ids = self.ids(module);
        self.reducing.begin(take(module, &mut earlier, |id| ids.contains(&id)));
    }

    /// After the forward pass, and after the backward pass: until [`resume`](Self::resume) or [`end_pass`](Self::end_pass)
    /// passes of others may run, whose gradients are not reduced. Buckets that have left are still reduced.
    pub fn pause(&self) {
        self.reducing.pause();
    }

    /// Before the backward pass: the gradients of `earlier`, of micro-batches before, are added to those of the pass. What
    /// is left of them are gradients of other parameters.
    ///
    /// # Panics
    /// If no pass was begun, or `earlier` has the gradient of a parameter whose bucket has already left: it would be lost.
    pub fn resume<M: Module>(&self, module: &M, mut earlier: GradientsParams) -> GradientsParams {
        let ids = self.ids(module);
        self.reducing.resume(take(module, &mut earlier, |id| ids.contains(&id)));
        earlier
    }

    /// Ends a pass. `grads`, which the backward pass has left, with the means over the ranks: those that this rank gets. A
    /// parameter that only some ranks used counts as zero on the others. Every rank must call it.
    ///
    /// # Panics
    /// If no pass was begun, or `grads` has the gradient of a parameter whose bucket has already left: it was used outside of
    /// the pass.
    pub fn end_pass<M: Module>(&self, module: &M, mut grads: GradientsParams) -> GradientsParams {
        let known = self.ids(module);
        let others = take(module, &mut grads, |id| known.contains(&id));
        let ids: Vec<ParamId> = others.iter().map(|other| other.id).collect();
        let means = self.reducing.end(others).into_iter().map(|(index, mean)| (ids[index], mean));
        put_back(module, means.collect(), grads)
    }

    /// The ids that the parameters of `module` have now.
    fn ids<M: Module>(&self, module: &M) -> HashSet<ParamId> {
        Ids { fields: &self.fields, ids: HashSet::new() }.walk(module).ids
    }

    /// How many buckets were reduced since the last call.
    pub fn take_counts(&self) -> Counts {
        self.reducing.take_counts()
    }
}

impl Reparameterizer for Reducer {
    type Reparam = Hooked;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Hooked>) {
        let Some(&field) = self.fields.get(path) else { return (param, None) };
        let hook = Hook { reducing: self.reducing.clone(), field, placements: Placements::of(&param.base()) };
        (param, Some(Hooked::new(hook)))
    }
}

/// The parameters that require gradients and are wanted, in visiting order.
struct Trained<'a> {
    of: &'a dyn Fn(ParamId) -> bool,
    ids: HashSet<ParamId>,
    /// The first of each parameter.
    paths: Vec<String>,
    /// Of all paths: a module may hold one parameter in several fields.
    fields: HashMap<String, Field>,
    known: HashMap<ParamId, usize>,
}

impl<'a> Trained<'a> {
    fn of(of: &'a dyn Fn(ParamId) -> bool) -> Self {
        Self { of, ids: HashSet::new(), paths: Vec::new(), fields: HashMap::new(), known: HashMap::new() }
    }
}

impl PathVisitor for Trained<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() || !(self.of)(param.id) {
            return;
        }
        let index = *self.known.entry(param.id).or_insert_with(|| {
            self.paths.push(path.to_string());
            self.paths.len() - 1
        });
        self.ids.insert(param.id);
        let at = self.fields.len();
        self.fields.insert(path.to_string(), Field { index, at });
    }
}

struct Ids<'a> {
    fields: &'a HashMap<String, Field>,
    ids: HashSet<ParamId>,
}

impl PathVisitor for Ids<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.fields.contains_key(path) {
            self.ids.insert(param.id);
        }
    }
}
