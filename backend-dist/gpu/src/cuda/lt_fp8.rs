//! FP8 GEMMs by cuBLASLt.
//!
//! On Hopper, cuBLASLt takes FP8 operands only with a contiguous contraction dimension in both (its `TN`), 16-byte
//! aligned and in multiples of 16 (<https://docs.nvidia.com/cuda/cublas/#cublasltmatmul>). Scales of vectors and blocks need
//! cuBLASLt 12.9; not both operands can have blocks.

use std::fmt;

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use kernels_cubecl::fp8::{BLOCK, Format, Granularity};

use super::lt::loaded;
use super::lt_plan::{self, Extras, Key};
pub use super::lt_plan::{Onto, Sums};
use super::submit;
use crate::column_major::{Matrices, Problem};
use crate::failed;
use crate::profile::{self, Kind, Operation, Precision};

/// All sizes of an FP8 GEMM must be multiples of this.
pub const MULTIPLE: usize = 16;

/// A contiguous matrix `[rows, inner]` of FP8 values.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    /// The bytes, `u8`.
    pub bytes: &'a CubeTensor,
    /// The factors of the values, f32: [`Granularity::scales`].
    pub inverse: &'a CubeTensor,
    /// Which values share a factor.
    pub granularity: Granularity,
    /// The format of the bytes.
    pub format: Format,
    /// Rows.
    pub rows: usize,
    /// The contraction dimension.
    pub inner: usize,
}

/// Writes `(a · inverse_a) (b · inverse_b)ᵀ + bias`, `[a.rows, b.rows]`, to `out` (contiguous bf16, f16 or f32), or
/// adds it. `bias` is contiguous, has the type of `out` and an element for each column.
///
/// # Panics
///
/// If sizes or types do not fit, cuBLASLt is not installed, or earlier work on the device failed. An error of this GEMM
/// is the panic of the thread's next one.
pub fn multiply(a: Operand, b: Operand, bias: Option<&CubeTensor>, out: &CubeTensor, onto: Onto, sums: Sums) {
    let what = Named { a: size(&a), b: size(&b), bias: bias.is_some(), out: out.dtype, onto };
    let _noted = profile::operation(out, || what.operation());
    queue(what, a, b, bias, out, sums);
}

/// [`multiply`] for one GEMM of a group; the caller records the group for profiles.
pub fn multiply_one(a: Operand, b: Operand, out: &CubeTensor, onto: Onto, sums: Sums) {
    let what = Named { a: size(&a), b: size(&b), bias: false, out: out.dtype, onto };
    queue(what, a, b, None, out, sums);
}

fn queue(what: Named, a: Operand, b: Operand, bias: Option<&CubeTensor>, out: &CubeTensor, sums: Sums) {
    let onto = what.onto;
    let matrices = [Matrices::dense(1, a.rows, a.inner), Matrices::dense(1, b.rows, b.inner).transposed()];
    let Some(problem) = Problem::new(&matrices[0], &matrices[1]) else { panic!("{what}: the sizes do not fit") };
    let granularity = [a.granularity, b.granularity];
    let (multiple, sums) = match granularity {
        [Granularity::Tensor, Granularity::Tensor] => (MULTIPLE, sums),
        [Granularity::Tensor, _] | [_, Granularity::Tensor] | [Granularity::Block, Granularity::Block] => {
            panic!("{what}: cuBLASLt has no GEMM of scales {granularity:?}")
        }
        _ => (BLOCK, Sums::Exact),
    };
    let multiples = [a.rows, b.rows, a.inner].iter().all(|&n| n > 0 && n.is_multiple_of(multiple));
    assert!(multiples, "{what}: every size must be a multiple of {multiple}");
    let Some(kinds) = lt_plan::fp8_kinds(a.format, b.format, out.dtype) else {
        panic!("{what}: cuBLASLt has no such GEMM; one operand must be e4m3, the result bf16, f16 or f32")
    };
    for operand in [&a, &b] {
        let held = operand.bytes.handle.size_in_used() as usize;
        let fits = operand.bytes.dtype == DType::U8 && held >= operand.rows * operand.inner;
        assert!(fits, "{what}: an operand is {:?} in a buffer of {held} bytes", operand.bytes.dtype);
        let (scale, [lines, line]) = (&operand.inverse.handle, operand.granularity.scales(operand.rows, operand.inner));
        let needed = (4 * lines * line) as u64;
        assert!(operand.inverse.dtype == DType::F32 && scale.size_in_used() >= needed, "{what}: no scale");
        let start = scale.offset_start.unwrap_or(0);
        assert!(start.is_multiple_of(MULTIPLE as u64), "{what}: a scale starts {start} bytes into its memory");
        operand.bytes.assert_is_on_same_device(out);
        operand.inverse.assert_is_on_same_device(out);
    }
    let held = out.handle.size_in_used() as usize / out.dtype.size();
    assert!(
        out.is_contiguous() && out.meta.shape().num_elements() == a.rows * b.rows && held >= a.rows * b.rows,
        "{what}: the result has {:?} elements with strides {:?}",
        out.meta.shape(),
        out.meta.strides()
    );
    if let Some(bias) = bias {
        let held = bias.handle.size_in_used() as usize / bias.dtype.size();
        assert!(
            bias.dtype == out.dtype && bias.is_contiguous() && held >= b.rows,
            "{what}: the bias is {:?}",
            bias.dtype
        );
        bias.assert_is_on_same_device(out);
    }
    loaded();
    let device = out.client.service_id().device;
    let run = move |pointers, scales, bias: Option<_>, stream| {
        let key = Key::new(problem, kinds, onto, bias.is_some(), Some((sums, granularity)), pointers);
        // SAFETY: operands, scales, bias and output were checked against their buffers, which are held until the work
        // is queued; CubeCL reuses memory in the order of this stream.
        let done =
            unsafe { lt_plan::run(device, stream, key, pointers, Extras { bias, scales: Some(scales), mixed: None }) };
        done.map_err(|error| format!("{what}: {error}"))
    };
    let failed = failed::noting(device.index_id);
    let tensors = [a.bytes, b.bytes, out, a.inverse, b.inverse];
    match bias {
        None => submit(tensors, move |[x, w, y, p, q], stream| run([x, w, y], [p, q], None, stream), failed),
        Some(bias) => {
            let [x, w, y, p, q] = tensors;
            submit(
                [x, w, y, p, q, bias],
                move |[x, w, y, p, q, bias], stream| run([x, w, y], [p, q], Some(bias), stream),
                failed,
            );
        }
    }
}

fn size(operand: &Operand) -> (Format, usize, usize) {
    (operand.format, operand.rows, operand.inner)
}

/// A GEMM in an error message.
#[derive(Clone, Copy)]
struct Named {
    a: (Format, usize, usize),
    b: (Format, usize, usize),
    bias: bool,
    out: DType,
    onto: Onto,
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let Self { a: (a, m, k), b: (b, n, l), bias, out, onto } = self;
        let bias = if *bias { " + bias" } else { "" };
        write!(f, "FP8 GEMM [{m}, {k}] {a:?} · [{n}, {l}]ᵀ {b:?}{bias} -> {out:?} ({onto:?})")
    }
}

impl Named {
    /// For a profile; GEMMs of the same sizes and types have the same name.
    fn operation(&self) -> Operation {
        let Self { a: (a, m, k), b: (b, n, _), bias, out, onto } = *self;
        let adds = onto == Onto::Add;
        let ends = [(bias, " + bias"), (adds, " +=")].map(|(has, text)| if has { text } else { "" }).concat();
        Operation {
            name: format!("GEMM [{m}, {k}] · [{k}, {n}] {a:?} {b:?} to {out:?}{ends}").into(),
            kind: Kind::Gemm,
            precision: Precision::Fp8,
            flops: 2.0 * m as f64 * (n * k) as f64,
            bytes: (m * k + k * n + m * n * out.size() * (1 + usize::from(adds))) as f64,
        }
    }
}
