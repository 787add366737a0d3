//! GEMMs by cuBLASLt on CubeCL's buffers, in the order of the rank's compute stream.

use std::fmt;
use std::sync::OnceLock;

use burn::tensor::{DType, Shape};
use burn_cubecl::tensor::CubeTensor;
use cudarc::cublaslt::sys;

use super::lt_plan::{self, Extras, Key};
pub use super::lt_plan::{Mixed, Onto};
use super::{POISON, Planned, clear, dense, empty, planned, submit_new};
use crate::column_major::{Matrices, Problem};
use crate::failed;
use crate::profile::{self, Kind, Operation, Precision};

/// A tensor as a batch of matrices, in place, or a copy of it if cuBLASLt cannot read its layout.
pub struct Operand {
    tensor: CubeTensor,
    matrices: Matrices,
    reserved_sms: usize,
}

impl Operand {
    /// The last dimension by all others.
    pub fn flat(x: CubeTensor) -> Self {
        Self::new(x, Matrices::flat)
    }

    /// The last two dimensions, the others as a batch.
    pub fn batched(x: CubeTensor) -> Self {
        Self::new(evenly_spaced(&x).unwrap_or(x), Matrices::batched)
    }

    /// The transpose, without a copy.
    pub fn transposed(self) -> Self {
        Self { matrices: self.matrices.transposed(), ..self }
    }

    /// The GEMM whose left operand this is leaves so many SMs to overlapped collectives.
    pub fn reserving_sms(self, reserved_sms: usize) -> Self {
        Self { reserved_sms, ..self }
    }

    /// Rows of a matrix.
    pub fn rows(&self) -> usize {
        self.matrices.rows
    }

    /// Columns of a matrix.
    pub fn columns(&self) -> usize {
        self.matrices.columns
    }

    fn new(x: CubeTensor, read: impl Fn(&[usize], &[usize]) -> Option<Matrices>) -> Self {
        let found = read(x.meta.shape(), x.meta.strides()).filter(|m| m.stored().is_some());
        let (tensor, matrices) = match found {
            Some(matrices) => (x, matrices),
            None => {
                let x = dense(x);
                let found = read(x.meta.shape(), x.meta.strides());
                (x, found.expect("a tensor without gaps is a batch of matrices"))
            }
        };
        let (held, needed) = (tensor.handle.size_in_used(), (matrices.span() * tensor.dtype.size()) as u64);
        assert!(needed <= held, "GEMM: {matrices:?} of {:?} in a buffer of {held} bytes", tensor.dtype);
        Self { tensor, matrices, reserved_sms: 0 }
    }
}

/// A copy of `x` that [`Operand::batched`] reads in place, with its columns contiguous if they are in `x`; `None` if `x` is
/// read in place itself.
pub fn evenly_spaced(x: &CubeTensor) -> Option<CubeTensor> {
    let (shape, strides) = (x.meta.shape(), x.meta.strides());
    if Matrices::batched(shape, strides).is_some_and(|matrices| matrices.stored().is_some()) {
        return None;
    }
    let (rows, columns) = (shape.num_dims() - 2, shape.num_dims() - 1);
    let is_transposed = strides[rows] == 1 && strides[columns] != 1;
    let swapped = |mut x: CubeTensor| {
        if is_transposed {
            x.meta.swap(rows, columns);
        }
        x
    };
    Some(swapped(dense(swapped(x.clone()))))
}

/// `a · b` in `shape`, which has as many elements, with elements of `dtype`.
pub fn gemm(a: Operand, b: Operand, shape: Shape, dtype: DType) -> CubeTensor {
    if shape.num_elements() == 0 || a.columns() == 0 || *POISON {
        let out = empty_like(&a, shape, dtype);
        multiply(a, b, &out, Onto::Replace);
        return out;
    }
    let (out, memory) = planned(&a.tensor, shape, dtype);
    issue(a, b, (None, None), (&out, Some(memory)), Onto::Replace);
    out
}

/// `alpha · a · b + beta · c` with `c` one of the operands, added in f32, or f64, before rounding. That operand is
/// contiguous and has the shape and type of the output.
pub fn gemm_mixed(a: CubeTensor, b: CubeTensor, mixed: Mixed) -> CubeTensor {
    let added = if mixed.left { &a } else { &b };
    assert!(added.is_contiguous(), "GEMM: an operand with strides {:?} is added", added.meta.strides());
    let out = empty(added, added.meta.shape().clone(), added.dtype);
    issue(Operand::batched(a), Operand::batched(b), (None, Some(mixed)), (&out, None), Onto::Add);
    out
}

/// [`gemm`] with `bias` added to every row before rounding. `bias` is contiguous, starts at a multiple of 16 bytes, and
/// has an element of type `dtype`, other than f64, for each column.
pub fn gemm_and_bias(a: Operand, b: Operand, bias: CubeTensor, shape: Shape, dtype: DType) -> CubeTensor {
    let out = empty_like(&a, shape, dtype);
    multiply_and_add_bias(a, b, bias, &out);
    out
}

/// [`multiply`], with the `bias` of [`gemm_and_bias`], which is the same for all matrices of a batch.
pub fn multiply_and_add_bias(a: Operand, b: Operand, bias: CubeTensor, out: &CubeTensor) {
    issue(a, b, (Some(bias), None), (out, None), Onto::Replace);
}

fn empty_like(a: &Operand, shape: Shape, dtype: DType) -> CubeTensor {
    empty(&a.tensor, shape, dtype)
}

/// Writes `a · b` to the elements of `out`, or adds it to them. Accumulates in f32, for f64 in f64. If `out` is a batch
/// of matrices, it may have gaps between its rows and matrices; otherwise it is contiguous.
///
/// The inputs have one type, bf16, f16, f32 or f64; `out` has the same type, or f32 if they have 16 bits.
///
/// # Panics
///
/// If sizes or types do not fit, cuBLASLt is not installed, or earlier work on the device failed. An error of this GEMM
/// is the panic of the thread's next one.
pub fn multiply(a: Operand, b: Operand, out: &CubeTensor, onto: Onto) {
    issue(a, b, (None, None), (out, None), onto);
}

/// What is added is a bias or an operand; the output may be new.
fn issue(
    a: Operand,
    b: Operand,
    (bias, mixed): (Option<CubeTensor>, Option<Mixed>),
    (out, new): (&CubeTensor, Option<Planned>),
    onto: Onto,
) {
    let (am, bm) = (a.matrices, b.matrices);
    let what = Named { a: (am, a.tensor.dtype), b: (bm, b.tensor.dtype), bias: bias.is_some(), out: out.dtype, onto };
    let there = match out.is_contiguous() {
        true => Some(Matrices::dense(am.batches, am.rows, bm.columns)),
        false => Matrices::batched(out.meta.shape(), out.meta.strides()),
    };
    let problem = there.and_then(|there| Some((Problem::new(&am, &bm)?.onto(&there)?, there.span())));
    let Some((problem, span)) = problem else {
        panic!("{what}: the sizes do not fit, or not a result of {:?}, {:?}", out.meta.shape(), out.meta.strides())
    };
    let kinds = lt_plan::kinds(a.tensor.dtype, b.tensor.dtype, out.dtype);
    let Some(kinds) = kinds else { panic!("{what}: no GEMM of these types is supported") };
    let elements = am.batches * am.rows * bm.columns;
    let held = out.handle.size_in_used() as usize / out.dtype.size();
    assert!(
        out.meta.shape().num_elements() == elements && held >= span,
        "{what}: the result has {:?} elements with strides {:?}",
        out.meta.shape(),
        out.meta.strides()
    );
    a.tensor.assert_is_on_same_device(&b.tensor);
    a.tensor.assert_is_on_same_device(out);
    if let Some(bias) = &bias {
        a.tensor.assert_is_on_same_device(bias);
        let held = bias.handle.size_in_used() as usize / out.dtype.size();
        assert!(
            bias.dtype == out.dtype && bias.is_contiguous() && held >= bm.columns && am.columns > 0,
            "{what}: the bias is {:?} {:?}",
            bias.meta.shape(),
            bias.dtype
        );
    }
    let problem = Problem { reserved_sms: a.reserved_sms, ..problem };
    if elements == 0 {
        return;
    }
    if am.columns == 0 {
        if onto == Onto::Replace {
            clear(out);
        }
        return;
    }
    loaded();
    let _noted = profile::operation(out, || what.operation());
    let device = out.client.service_id().device;
    let run = move |pointers, bias: Option<_>, stream| {
        let key = Key::new(problem, kinds, onto, bias.is_some(), None, pointers);
        // SAFETY: the spans of operands, bias and output were checked against their buffers, which are held until the
        // work is queued; CubeCL reuses memory in the order of this stream.
        let done = unsafe { lt_plan::run(device, stream, key, pointers, Extras { bias, scales: None, mixed }) };
        done.map_err(|error| format!("{what}: {error}"))
    };
    let failed = failed::noting(device.index_id);
    match bias {
        None => {
            let work = move |pointers, stream| run(pointers, None, stream);
            submit_new(new, [&a.tensor, &b.tensor, out], work, failed);
        }
        Some(bias) => {
            let work = move |[a, b, out, bias]: [_; 4], stream| run([a, b, out], Some(bias), stream);
            submit_new(new, [&a.tensor, &b.tensor, out, &bias], work, failed);
        }
    }
}

/// A GEMM in an error message. Formatted only then, because all GEMMs are launched through here.
#[derive(Clone, Copy)]
struct Named {
    a: (Matrices, DType),
    b: (Matrices, DType),
    bias: bool,
    out: DType,
    onto: Onto,
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { a: (a, a_type), b: (b, b_type), bias, out, onto } = self;
        let bias = if *bias { " + bias" } else { "" };
        let [m, k, l, n] = [a.rows, a.columns, b.rows, b.columns];
        let sizes = format!("{} x [{m}, {k}] {a_type:?} · {} x [{l}, {n}] {b_type:?}", a.batches, b.batches);
        write!(f, "GEMM {sizes}{bias} -> {out:?} ({onto:?})")
    }
}

impl Named {
    /// For a profile; GEMMs of the same sizes and types have the same name.
    fn operation(&self) -> Operation {
        let Self { a: (a, dtype), b: (b, _), bias, out, onto } = self;
        let [batches, m, n, k] = [a.batches, a.rows, b.columns, a.columns];
        let adds = *onto == Onto::Add;
        let precision = match dtype.size() {
            8 => Precision::Double,
            4 => Precision::Single,
            _ => Precision::Half,
        };
        let many = if batches > 1 { format!("{batches} x ") } else { String::new() };
        let ends = [(*bias, " + bias"), (adds, " +=")].map(|(has, text)| if has { text } else { "" }).concat();
        let types = if out == dtype { format!("{dtype:?}") } else { format!("{dtype:?} to {out:?}") };
        let read = (m * k + k * n) * dtype.size() + m * n * out.size() * usize::from(adds);
        Operation {
            name: format!("GEMM {many}[{m}, {k}] · [{k}, {n}] {types}{ends}").into(),
            kind: Kind::Gemm,
            precision,
            flops: 2.0 * (batches * m) as f64 * (n * k) as f64,
            bytes: (batches * (read + m * n * out.size())) as f64,
        }
    }
}

/// # Panics
/// If cuBLASLt cannot be loaded.
pub(super) fn loaded() {
    static LOADED: OnceLock<bool> = OnceLock::new();
    // SAFETY: loading a library runs its initialisers; cuBLASLt's have no preconditions.
    let loaded = *LOADED.get_or_init(|| unsafe { sys::is_culib_present() });
    assert!(
        loaded,
        "cuBLASLt (libcublasLt.so) is not found: install cuBLAS for the driver's CUDA version (Debian and Ubuntu: \
         libcublas-12-x or libcublas-13-x; pip: nvidia-cublas) and put its folder into LD_LIBRARY_PATH"
    );
}
