//! How a rank runs its share: elementwise operations and reductions over rows wait until they can run together as one
//! kernel, and GEMMs go to the library.
//!
//! Under autocast, tensors that Burn knows as f32 may be stored in half precision: GEMMs read and write half precision,
//! and what is computed from that alone remains so. Sums over rows, parameters and their gradients are f32.

mod chain;
mod expression;
mod views;

pub(super) use chain::{Launch, Limits, Written};

use super::ids::{ById, Ids};
use super::inner::Inner;
use burn::backend::{DTypeUsageSet, ExecutionError};
use burn::tensor::{DType, Shape, TensorData};
use burn_ir::{
    FloatOperationIr, HandleKind, MatmulOpIr, NumericOperationIr, OperationIr, TensorId, TensorIr, TensorStatus,
};
use burn_router::TensorInterpreter;
use burn_std::future::DynFut;
use chain::{Chain, Operand};
use expression::{Expression, expression};
use kernels_cubecl::fused::{Draw, Extent};
use std::collections::BTreeMap;
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
    /// Tensors that are stored in half precision.
    halves: Ids,
    /// Tensors of which there is a copy in half precision.
    copies: ById<Float<B>>,
    /// What tensors are views of, as far as that still exists.
    views: ById<(TensorId, Vec<View>)>,
    chain: Chain<Float<B>>,
    /// Sums over rows of what the chain computes, and their outputs.
    waiting: Vec<OperationIr>,
    late: Ids,
    /// Tensors of which all elements are one number.
    constants: ById<(f64, Shape)>,
    kernels: BTreeMap<&'static str, usize>,
    /// Batches of GEMMs that wait whether they are summed.
    gemms: ById<Gemm<B>>,
}

/// `a · b` of each matrix.
struct Gemm<B: Inner> {
    a: Float<B>,
    b: Float<B>,
    dtype: DType,
}

impl<B: Inner> Executor<B> {
    /// Tensors on `device`; `half` is the half precision type of autocast.
    pub fn new(device: B::Device, fuses: bool, half: Option<DType>) -> Self {
        Self {
            inner: TensorInterpreter::new(device.clone()),
            device,
            fuses,
            limits: B::chains(half.is_some()),
            half,
            halves: Ids::default(),
            copies: ById::default(),
            views: ById::default(),
            chain: Chain::default(),
            waiting: Vec::new(),
            late: Ids::default(),
            constants: ById::default(),
            kernels: BTreeMap::new(),
            gemms: ById::default(),
        }
    }

    /// Runs an operation, or lets it wait.
    pub fn register_op(&mut self, op: OperationIr) {
        if !self.fuses {
            return self.inner.register_op(op);
        }
        match &op {
            OperationIr::Drop(x) => self.drop_tensor(x.id),
            OperationIr::Float(dtype, FloatOperationIr::Matmul(op)) if dtype.is_float() => self.matmul(op),
            _ if self.note_constant(&op) || self.fuse(&op) || self.sum_gemms(&op) || self.wait(&op) => {}
            _ => self.run(op),
        }
    }

    /// Keeps a tensor of which all elements are one number as that number.
    fn note_constant(&mut self, op: &OperationIr) -> bool {
        let constant = expression::constant(op).filter(|(_, out)| out.dtype == self.limits.dtype);
        if let Some((value, out)) = constant {
            self.constants.insert(out.id, (value, out.shape.clone()));
        }
        constant.is_some()
    }

    /// Adds an operation to the chain, or begins another with it.
    fn fuse(&mut self, op: &OperationIr) -> bool {
        if let Some((x, out, View::Reshape(_))) = view(op)
            && self.chain.reshape(x, out)
        {
            return true;
        }
        let constants = &self.constants;
        let constant = |x: &TensorIr| constants.get(&x.id).map(|(value, _)| *value);
        let Some((expression, out)) = expression(op, constant) else {
            return false;
        };
        if out.dtype != self.limits.dtype {
            return false;
        }
        if let Some(value) = expression.value() {
            self.constants.insert(out.id, (value, out.shape.clone()));
        } else {
            let mut inputs = Vec::new();
            expression.tensors(&mut |x| inputs.push(x.id));
            inputs.into_iter().for_each(|id| self.settle_before(id));
            if !self.join(&expression, out) {
                self.flush();
                if !self.join(&expression, out) {
                    return false;
                }
            }
        }
        if !self.constants.is_empty() {
            let consumed = op.inputs().filter(|x| x.status == TensorStatus::ReadWrite);
            consumed.for_each(|x| drop(self.constants.remove(&x.id)));
        }
        true
    }

    /// A random tensor of zeros and ones, if it can be computed where it is used.
    pub fn bernoulli(&mut self, out: &TensorIr, draw: Draw) -> bool {
        if !self.fuses || out.dtype != self.limits.dtype {
            return false;
        }
        let expression = Expression::Bernoulli(draw);
        if !self.join(&expression, out) {
            self.flush();
            return self.join(&expression, out);
        }
        true
    }

    fn join(&mut self, expression: &Expression, out: &TensorIr) -> bool {
        let Self { chain, inner, halves, copies, views, half, limits, .. } = self;
        chain.join((expression, out), *limits, |x, extent| {
            let (is_stored_half, has_copy) = (halves.contains(&x.id), copies.contains_key(&x.id));
            let mut handle = float(inner.get_tensor(x));
            if x.status == TensorStatus::ReadWrite {
                halves.remove(&x.id);
                copies.remove(&x.id);
                views.remove(&x.id);
            }
            let is_half = is_stored_half && matches!(extent, Extent::Whole | Extent::PerColumn) && half.is_some();
            if is_stored_half && !is_half {
                handle = B::float_cast(handle, x.dtype.into());
            }
            Operand { handle, is_half, has_copy }
        })
    }

    /// Lets a sum over leading dimensions of what the chain computes wait for the chain, which can go on meanwhile.
    fn wait(&mut self, op: &OperationIr) -> bool {
        let (x, out, last) = match op {
            OperationIr::NumericFloat(_, NumericOperationIr::SumDim(op)) => (&op.input, &op.out, op.axis),
            OperationIr::NumericFloat(_, NumericOperationIr::SumDims(op)) => {
                (&op.input, &op.out, op.axes.iter().copied().max().unwrap_or(0))
            }
            _ => return false,
        };
        if last + 1 == x.shape.num_dims() || !self.chain.has(x.id) {
            return false;
        }
        self.chain.pin(x.id);
        self.late.insert(out.id);
        self.waiting.push(op.clone());
        true
    }

    fn run(&mut self, op: OperationIr) {
        let inputs: Vec<TensorIr> = op.inputs().cloned().collect();
        inputs.iter().for_each(|x| self.settle(x.id));
        if let Some((x, out, view)) = view(&op) {
            self.count("view");
            self.link(x, out.id, view);
            self.inner.register_op(op);
        } else if !self.sum_columns(&op) {
            self.count(kind(&op));
            inputs.iter().for_each(|x| self.widen(x));
            self.inner.register_op(op);
        }
        inputs.iter().filter(|x| x.status == TensorStatus::ReadWrite).for_each(|x| self.forget(x.id));
    }

    /// Sums over all dimensions but the last, in f32.
    fn sum_columns(&mut self, op: &OperationIr) -> bool {
        let (x, out, axes) = match op {
            OperationIr::NumericFloat(_, NumericOperationIr::SumDim(op)) => (&op.input, &op.out, vec![op.axis]),
            OperationIr::NumericFloat(_, NumericOperationIr::SumDims(op)) => (&op.input, &op.out, op.axes.clone()),
            _ => return false,
        };
        let last = x.shape.num_dims() - 1;
        let is_summed = |dim: usize| x.shape[dim] == 1 || axes.contains(&dim);
        if out.dtype != self.limits.dtype || axes.contains(&last) || !(0..last).all(is_summed) {
            return false;
        }
        self.count("sum of rows");
        let handle = float(self.inner.get_tensor(x));
        let sum = B::float_reshape(B::bias_grad(handle), out.shape.clone());
        self.insert(out.id, sum, false);
        true
    }

    /// The output of a view is stored as its input is, and knows where to find a copy in half precision.
    fn link(&mut self, x: &TensorIr, out: TensorId, view: View) {
        if self.halves.contains(&x.id) {
            self.halves.insert(out);
        } else if self.half.is_some() {
            let (root, mut views) = self.views.get(&x.id).cloned().unwrap_or((x.id, Vec::new()));
            views.push(view);
            self.views.insert(out, (root, views));
        }
    }

    /// `a · b`.
    fn matmul(&mut self, op: &MatmulOpIr) {
        let dtype = self.half.filter(|_| op.out.dtype == self.limits.dtype).unwrap_or(op.out.dtype);
        for x in [&op.lhs, &op.rhs] {
            if Some(dtype) == self.half {
                self.chain.want_half(x.id);
            }
            self.settle(x.id);
        }
        let [a, b] = [&op.lhs, &op.rhs].map(|x| self.in_type(x, dtype));
        let (rank, batches) = (op.out.shape.num_dims(), op.out.shape[0]);
        self.gemms.insert(op.out.id, Gemm { a, b, dtype });
        // Burn's gradient of a weight is a sum over samples.
        let may_be_summed = rank == 3 && batches > 1 && op.lhs.shape[0] == batches && op.rhs.shape[0] == batches;
        if !may_be_summed {
            self.run_gemm(op.out.id);
        }
    }

    fn run_gemm(&mut self, id: TensorId) {
        let Some(Gemm { a, b, dtype }) = self.gemms.remove(&id) else { return };
        self.count("GEMM");
        self.insert(id, B::gemm(a, b, dtype), self.half == Some(dtype));
    }

    /// Runs waiting GEMMs as one if `op` sums their results over the first dimension and nobody else reads them.
    fn sum_gemms(&mut self, op: &OperationIr) -> bool {
        let OperationIr::NumericFloat(_, NumericOperationIr::SumDim(sum)) = op else { return false };
        let (x, out) = (&sum.input, &sum.out);
        if sum.axis != 0 || x.status != TensorStatus::ReadWrite {
            return false;
        }
        let Some(Gemm { a, b, .. }) = self.gemms.remove(&x.id) else { return false };
        self.count("GEMM");
        let [batches, rows, inner] = dims(&a);
        let columns = dims(&b)[2];
        let a = B::float_reshape(B::float_swap_dims(a, 1, 2), Shape::from([1, batches * inner, rows]));
        let b = B::float_reshape(b, Shape::from([1, batches * inner, columns]));
        self.insert(out.id, B::gemm(B::float_swap_dims(a, 1, 2), b, out.dtype), false);
        true
    }

    /// `x` in `dtype`, which is its own type or autocast's.
    fn in_type(&mut self, x: &TensorIr, dtype: DType) -> Float<B> {
        let is_consumed = x.status == TensorStatus::ReadWrite;
        if dtype == x.dtype || self.halves.contains(&x.id) {
            self.widen_unless(x, dtype);
            let handle = float(self.inner.get_tensor(x));
            if is_consumed {
                self.forget(x.id);
            }
            return handle;
        }
        let copy = self.copy(x.id, x, dtype);
        if is_consumed {
            self.drop_tensor(x.id);
        }
        copy
    }

    /// The copy of `id`, which is `x` or what it is a view of, in half precision.
    fn copy(&mut self, id: TensorId, x: &TensorIr, dtype: DType) -> Float<B> {
        if let Some(copy) = self.copies.get(&id) {
            return copy.clone();
        }
        let copy = match self.views.get(&id).cloned() {
            Some((root, views)) if self.inner.read_failure(&root).is_none() && !self.halves.contains(&root) => {
                let whole = self.copy(root, x, dtype);
                views.into_iter().fold(whole, |x, view| view.apply::<B>(x))
            }
            _ => {
                self.count("cast");
                let stored = TensorIr { id, status: TensorStatus::ReadOnly, ..x.clone() };
                B::float_cast(float(self.inner.get_tensor(&stored)), dtype.into())
            }
        };
        self.copies.insert(id, copy.clone());
        copy
    }

    fn widen_unless(&mut self, x: &TensorIr, dtype: DType) {
        if Some(dtype) != self.half {
            self.widen(x);
        }
    }

    /// Stores `x` in its own type.
    fn widen(&mut self, x: &TensorIr) {
        if self.halves.remove(&x.id) {
            self.count("cast");
            let stored = TensorIr { status: TensorStatus::ReadWrite, ..x.clone() };
            let wide = B::float_cast(float(self.inner.get_tensor(&stored)), x.dtype.into());
            self.inner.register_tensor_to_device(x.id, HandleKind::Float(wide));
        }
    }

    /// Lets nothing wait that computes this tensor.
    fn settle(&mut self, id: TensorId) {
        self.settle_before(id);
        if self.chain.has(id) {
            self.flush();
        }
        if let Some((value, shape)) = self.constants.remove(&id) {
            let whole = B::float_full(shape, value.into(), &self.device, self.limits.dtype.into());
            self.insert(id, whole, false);
        }
    }

    /// Lets nothing wait that computes this tensor, but for the chain.
    fn settle_before(&mut self, id: TensorId) {
        self.run_gemm(id);
        if self.late.contains(&id) {
            self.flush();
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

    /// Runs the chain and what waits for it.
    fn flush(&mut self) {
        if let Some(launch) = self.chain.take(self.limits.dtype, self.half.is_some()) {
            self.count("fused kernel");
            let targets: Vec<_> = launch.outputs.iter().map(|x| (x.id, x.is_half, x.is_copy)).collect();
            for ((id, is_half, is_copy), x) in
                targets.into_iter().zip(B::fused(launch, self.half.unwrap_or(DType::BF16), &self.device))
            {
                if is_copy {
                    self.copies.insert(id, x);
                } else {
                    self.insert(id, x, is_half);
                }
            }
        }
        self.late.clear();
        for op in std::mem::take(&mut self.waiting) {
            self.run(op);
        }
        self.chain.take_released().into_iter().for_each(|id| self.drop_tensor(id));
    }

    /// Runs everything that waits.
    fn flush_all(&mut self) {
        let gemms: Vec<_> = self.gemms.keys().copied().collect();
        gemms.into_iter().for_each(|id| self.run_gemm(id));
        self.flush();
    }

    fn drop_tensor(&mut self, id: TensorId) {
        if self.late.contains(&id) {
            self.flush();
        }
        let waits = self.gemms.remove(&id).is_some() || self.chain.forget(id) || self.constants.remove(&id).is_some();
        if !waits {
            let tensor = TensorIr {
                id,
                shape: Shape::from(Vec::<usize>::new()),
                status: TensorStatus::ReadWrite,
                dtype: DType::F32,
            };
            self.inner.register_op(OperationIr::Drop(tensor));
        }
        self.forget(id);
    }

    fn forget(&mut self, id: TensorId) {
        self.halves.remove(&id);
        self.copies.remove(&id);
        self.views.remove(&id);
    }

    /// The tensor as it is stored, and whether that is half precision.
    pub fn stored(&mut self, x: &TensorIr) -> (HandleKind<B>, bool) {
        self.settle(x.id);
        let is_half = self.halves.contains(&x.id);
        if x.status == TensorStatus::ReadWrite {
            self.forget(x.id);
        }
        (self.inner.get_tensor(x), is_half)
    }

    pub fn register_stored(&mut self, id: TensorId, x: HandleKind<B>, is_half: bool) {
        self.inner.register_tensor_to_device(id, x);
        if is_half {
            self.halves.insert(id);
        }
    }

    pub fn register_data(&mut self, id: TensorId, data: TensorData) {
        self.inner.register_tensor_data_id(id, data);
    }

    /// Another name of a tensor.
    pub fn register_alias(&mut self, new: TensorId, id: TensorId) {
        self.settle(id);
        self.inner.register_alias(new, id);
        if self.halves.contains(&id) {
            self.halves.insert(new);
        }
    }

    pub fn read(&mut self, x: TensorIr) -> DynFut<Result<TensorData, ExecutionError>> {
        self.settle(x.id);
        self.widen(&x);
        if x.status == TensorStatus::ReadWrite {
            self.forget(x.id);
        }
        self.inner.read_tensor_async(x)
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

fn float<B: Inner>(x: HandleKind<B>) -> Float<B> {
    match x {
        HandleKind::Float(x) => x,
        _ => unreachable!("chains and GEMMs are of floats"),
    }
}

/// What kind of operation runs alone.
fn kind(op: &OperationIr) -> &'static str {
    match op {
        OperationIr::BaseFloat(_) | OperationIr::BaseInt(_) | OperationIr::BaseBool(_) => "movement alone",
        OperationIr::NumericFloat(..) => "arithmetic alone",
        OperationIr::Float(..) => "function alone",
        OperationIr::Activation(_) => "activation alone",
        OperationIr::Module(_) => "module operation",
        _ => "operation on integers",
    }
}

fn dims<T: burn::backend::TensorMetadata>(x: &T) -> [usize; 3] {
    let shape = x.shape();
    [shape[0], shape[1], shape[2]]
}
