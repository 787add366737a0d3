//! How a rank runs its share: elementwise operations and reductions over rows wait until they can run together as one
//! kernel, and GEMMs go to the library.
//!
//! Under autocast, tensors that Burn knows as f32 may be stored in half precision: GEMMs read and write half precision,
//! and what is computed from that alone remains so. Sums over rows, parameters and their gradients are f32.

mod arriving;
mod attention;
mod chain;
mod deferred;
mod ends;
mod expression;
mod fp8;
mod fuse;
mod gemms;
mod generated;
mod lazy;
mod masks;
mod precision;
mod reads;
mod scores;
mod softmax;
mod steps;
mod storage;
mod sums;
mod views;
mod whole;

pub(super) use chain::{Launch, Limits, Written};
pub(super) use expression::Generated;

use super::ids::{ById, Ids};
use super::inner::Inner;
use super::options::LogicalOptions;
use arriving::Gather;
use burn::backend::{DTypeUsageSet, ExecutionError};
use burn::tensor::{DType, Shape};
use burn_ir::{FloatOperationIr, HandleKind, OperationIr, TensorId, TensorStatus};
use burn_router::TensorInterpreter;
use chain::{Chain, Deferred};
use lazy::{Gemm, Name, Source, ValueGradient};
use masks::OfMask;
use ops::fp8::Matrix;
use softmax::Known;
use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, OnceLock};
use steps::Steps;
use storage::float;
use sums::Sum;
use views::{View, view};

type Float<B> = burn::backend::tensor::FloatTensor<B>;

/// A rank's tensors and the operations that have not run yet.
pub(super) struct Executor<B: Inner> {
    inner: TensorInterpreter<B>,
    device: B::Device,
    /// Whether operations wait to run together.
    fuses: bool,
    /// Which.
    limits: Limits,
    /// The half precision type of autocast.
    half: Option<DType>,
    /// Whether layers multiply in FP8, and what the last of them read.
    fp8: bool,
    cast: Option<(TensorId, Matrix<B>)>,
    /// Tensors that are stored in half precision.
    halves: Ids,
    /// Tensors of which there is a copy in half precision.
    copies: ById<Float<B>>,
    /// Those of tensors that are one under several names, by each name.
    shared_copies: ById<Arc<OnceLock<Float<B>>>>,
    /// What tensors are views of, as far as that still exists.
    views: ById<(TensorId, Vec<View>)>,
    chain: Chain<Source<B>>,
    /// Elements of the rank's share of a parameter, for each size that there is.
    lasting: HashSet<usize>,
    /// Tensors that are computed where they are used.
    generated: ById<(Generated, Shape)>,
    kernels: BTreeMap<&'static str, usize>,
    /// What attention saved for its backward pass, as kernels keep it.
    logsumexps: ById<Float<B>>,
    /// Batches of GEMMs that wait whether they are summed, or are a part of attention.
    gemms: ById<Arc<Gemm<B>>>,
    /// That of a layer, which waits for a bias or a collective until the next GEMM at most.
    layer: Option<TensorId>,
    /// Tensors that are computed only if somebody reads them, and views of such.
    deferred: ById<Deferred<Source<B>>>,
    viewed: ById<(Deferred<Source<B>>, Vec<View>)>,
    /// How many outputs launches have had.
    written: usize,
    /// What tensors are transposes of.
    names: ById<Name>,
    /// What tensors are of masks.
    of_masks: ById<OfMask>,
    value_gradients: ById<ValueGradient<B>>,
    /// What launches were recognized as.
    known: Known,
    /// Optimizer steps that wait for others like them.
    steps: Steps<B>,
    /// Whether sums of GEMMs wait for collectives that they hide, and those that wait.
    hides: bool,
    sums: Vec<Sum<B>>,
    /// A gather that is on its way, for the next GEMM.
    arriving: Option<Gather<B>>,
    /// How many tensors were named here.
    parts: u64,
}

impl<B: Inner> Executor<B> {
    /// Tensors on `device`. Where it `hides` collectives, GEMMs wait for them.
    pub fn new(device: B::Device, hides: bool, options: LogicalOptions) -> Self {
        let (fuses, half) = (options.fusion.unwrap_or(B::FUSES), options.half());
        Self {
            inner: TensorInterpreter::new(device.clone()),
            device,
            fuses,
            limits: B::chains(half.is_some()),
            half,
            fp8: options.fp8,
            cast: None,
            halves: Ids::default(),
            copies: ById::default(),
            shared_copies: ById::default(),
            views: ById::default(),
            chain: Chain::default(),
            lasting: HashSet::new(),
            generated: ById::default(),
            kernels: BTreeMap::new(),
            logsumexps: ById::default(),
            gemms: ById::default(),
            layer: None,
            deferred: ById::default(),
            viewed: ById::default(),
            written: 0,
            names: ById::default(),
            of_masks: ById::default(),
            value_gradients: ById::default(),
            known: Known::default(),
            steps: Steps::default(),
            hides,
            sums: Vec::new(),
            arriving: None,
            parts: 0,
        }
    }

    /// Runs an operation, or lets it wait.
    pub fn register_op(&mut self, op: &OperationIr) {
        debug_assert!(!matches!(op, OperationIr::Drop(_)), "tensors end by `drop_tensor`");
        if !self.fuses {
            return self.run_at_once(op);
        }
        self.arrive_for(op);
        self.note_mask(op);
        if matches!(op, OperationIr::Module(_) | OperationIr::Float(_, FloatOperationIr::Matmul(_))) {
            // No AdamW has these: the optimizer's last step has come, and what steps read is not to be memory in a pass.
            self.run_steps();
        }
        match op {
            _ if self.transpose(op) => {}
            OperationIr::Float(_, FloatOperationIr::Matmul(op))
                if op.lhs.dtype.is_float() && op.rhs.dtype == op.lhs.dtype =>
            {
                self.matmul(op);
            }
            _ if self.note_constant(op)
                || self.add_bias(op)
                || self.fuse(op)
                || self.sum_gemms(op)
                || self.sum_in_chain(op)
                || self.sum_all(op)
                || self.attention(op) => {}
            _ => self.run(op),
        }
    }

    /// Runs an operation as it comes. Attention in f64 is ours: Burn's has its softmax in f32.
    fn run_at_once(&mut self, op: &OperationIr) {
        let is_double = || op.inputs().next().is_some_and(|x| x.dtype == DType::F64);
        if matches!(op, OperationIr::Module(_)) && is_double() && self.attention(op) {
            return;
        }
        self.inner.register_op(op.clone());
    }

    fn run(&mut self, op: &OperationIr) {
        let view = view(op);
        if let Some((x, out, view)) = &view
            && self.defer_view(x, out.id, view)
        {
            return;
        }
        op.inputs().for_each(|x| self.settle(x.id));
        if let Some((x, out, view)) = view {
            self.count("view");
            self.link(x, out.id, &view);
            self.apply_view(x, out.id, view);
        } else if !self.sum_columns(op) {
            self.count(kind(op));
            op.inputs().for_each(|x| self.widen(x));
            self.inner.register_op(op.clone());
        }
        op.inputs().filter(|x| x.status == TensorStatus::ReadWrite).for_each(|x| self.forget(x.id));
    }

    /// Lets nothing wait that computes this tensor.
    pub fn settle(&mut self, id: TensorId) {
        self.settle_generated(id);
        if self.chain.has(id) {
            self.flush(Some(id));
        }
    }

    /// Lets nothing wait that computes this tensor, but for the chain if that can read it.
    fn settle_before(&mut self, id: TensorId) {
        self.run_step(id);
        self.run_gemm(id);
        self.run_sum_of(id);
        self.run_value_gradient(id);
        self.run_deferred(id);
        if self.chain.is_sum(id) {
            self.flush(Some(id));
        }
    }

    fn count(&mut self, kernel: &'static str) {
        *self.kernels.entry(kernel).or_default() += 1;
    }

    /// How often each kind of kernel ran.
    pub fn kernels(&self) -> &BTreeMap<&'static str, usize> {
        &self.kernels
    }

    fn insert(&mut self, id: TensorId, x: Float<B>, is_half: bool) {
        self.inner.register_tensor_to_device(id, HandleKind::Float(x));
        if is_half {
            self.halves.insert(id);
        }
    }

    /// Runs the chain, which stores the `wanted` tensor.
    fn flush(&mut self, wanted: Option<TensorId>) {
        if let Some((mut launch, remade)) = self.chain.take(self.limits.dtype, self.half.is_some(), wanted) {
            let others = std::mem::take(&mut launch.others);
            let targets: Vec<_> = launch.outputs.iter().map(|x| (x.id, x.is_half, x.is_copy)).collect();
            let written = self.launch(launch);
            self.defer_remade(remade, &written);
            for (output, x) in others {
                let reshaped = B::float_reshape(written[output].clone(), x.shape);
                self.keep((x.id, x.is_half, x.is_copy), reshaped);
            }
            for (target, x) in targets.into_iter().zip(written) {
                self.keep(target, x);
            }
        }
    }

    fn keep(&mut self, (id, is_half, is_copy): (Option<TensorId>, bool, bool), x: Float<B>) {
        let Some(id) = id else { return };
        if is_copy {
            self.copies.insert(id, x);
        } else {
            self.insert(id, x, is_half);
        }
    }

    /// Runs everything that waits.
    fn flush_all(&mut self) {
        self.arrive();
        let gemms: Vec<_> = self.gemms.keys().copied().collect();
        gemms.into_iter().for_each(|id| self.run_gemm(id));
        self.run_sums(usize::MAX);
        self.run_steps();
        self.flush(None);
    }

    /// Waits for the device, after everything has been given to it.
    pub fn sync(&mut self) -> Result<(), ExecutionError> {
        self.flush_all();
        self.inner.sync()
    }

    pub fn dtype_usage(&self, dtype: DType) -> DTypeUsageSet {
        self.inner.dtype_usage(dtype)
    }
}

/// What kind of operation runs alone.
fn kind(op: &OperationIr) -> &'static str {
    match op {
        OperationIr::BaseFloat(_) => "movement alone",
        OperationIr::NumericFloat(..) => "arithmetic alone",
        OperationIr::Float(..) => "function alone",
        OperationIr::Activation(_) => "activation alone",
        OperationIr::Module(_) => "module operation",
        _ => "integers and booleans",
    }
}
