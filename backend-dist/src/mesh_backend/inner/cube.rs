//! On NVIDIA GPUs: chains by our kernel, GEMMs by cuBLASLt.

use super::Inner;
use crate::mesh_backend::executor::{Launch, Limits, Written};
use burn::backend::tensor::{Device, FloatTensor};
use burn::backend::{Backend, Cube, ops::FloatTensorOps};
use burn::tensor::{DType, FloatDType, Shape};
use burn_std::tensor::{ReshapeAction, reshape_action};
use gpu::cuda::lt::{self, Operand};
use gpu::cuda::{empty_all, packed_rows};
use kernels_cubecl::fused::{self, Plan};
use ops::{LocalKernels, packed};
use ranks::collective_ops::Collective;
use ranks::comm::Group;
use ranks::overlap::together;

impl Inner for Cube {
    const FUSES: bool = true;

    fn chains(_: bool) -> Limits {
        let (fits, sums) = (fused::row_fits, fused::rows_can_be_summed);
        Limits { dtype: DType::F32, fits, sums, elements: fused::MOST }
    }

    fn fused(launch: Launch<FloatTensor<Self>>, half: DType, device: &Device<Self>) -> Vec<FloatTensor<Self>> {
        let Launch { program, rows, columns, inputs, shares, scalars, draws, outputs, .. } = launch;
        let inputs: Vec<_> = inputs.into_iter().map(packed).collect();
        let any = || Self::float_empty(Shape::from([1]), device, FloatDType::F32);
        let like = inputs.first().cloned().unwrap_or_else(any);
        let client = like.client.clone();
        let tensor = |x: Written| (x.shape, if x.is_half { half } else { DType::F32 });
        let outputs = empty_all(&like, outputs.into_iter().map(tensor));
        let plan = Plan::of(&client, &program, rows, columns).expect("the chain's limits are the kernel's");
        let scalars: Vec<f32> = scalars.into_iter().map(|x| x as f32).collect();
        let read: Vec<_> = inputs.iter().map(|x| &x.handle).collect();
        let written: Vec<_> = outputs.iter().map(|x| &x.handle).collect();
        let size = (rows, columns);
        let done = match half {
            DType::F16 => {
                fused::launch::<half::f16>(&client, program, plan, &read, &shares, &scalars, &draws, &written, size)
            }
            _ => fused::launch::<half::bf16>(&client, program, plan, &read, &shares, &scalars, &draws, &written, size),
        };
        done.unwrap_or_else(|error| panic!("a fused kernel: {error}"));
        outputs
    }

    fn keeping_memory<T: Send>(device: &Device<Self>, work: impl FnOnce() -> T + Send) -> T {
        <Self as Backend>::memory_persistent_allocations(device, work, |work| work())
    }

    fn hand_over(device: &Device<Self>) {
        gpu::cuda::flush_device(device.to_id());
    }

    fn is_async(group: &Group) -> bool {
        together::is_connected(group)
    }

    fn begin_async(
        parts: Vec<(FloatTensor<Self>, Collective)>,
        mean: bool,
        group: &Group,
    ) -> (Vec<FloatTensor<Self>>, Box<dyn Send>) {
        let (results, pending) = together::begin(parts, mean, group);
        (results, Box::new(pending))
    }

    fn collective_by_dma(
        x: &FloatTensor<Self>,
        what: &Collective,
        group: &Group,
        meanwhile: &mut dyn FnMut(usize),
    ) -> Option<FloatTensor<Self>> {
        ops::collective_by_dma(x, what, group, meanwhile)
    }

    type Arriving = ops::Arriving;

    fn begin_gather(x: &FloatTensor<Self>, group: &Group) -> Option<(FloatTensor<Self>, ops::Arriving)> {
        ops::begin_gather(x, group)
    }

    fn gemm_of_arriving(x: ops::Arriving, b: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self> {
        ops::gemm_of_arriving(x, b, bias)
    }

    fn gemm_and_collective(
        operands: (FloatTensor<Self>, FloatTensor<Self>, Option<FloatTensor<Self>>),
        what: &Collective,
        group: &Group,
        meanwhile: &mut dyn FnMut(usize),
    ) -> Option<FloatTensor<Self>> {
        ops::gemm_and_collective(operands, what, group, meanwhile)
    }

    fn sum_rows(x: FloatTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        // Half precision is summed in f32 as it is read.
        let is_read_so = matches!(x.dtype, DType::BF16 | DType::F16) && dtype == DType::F32;
        Self::bias_grad(if is_read_so { x } else { Self::float_cast(x, dtype.into()) })
    }

    fn reshaped(x: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        let is_copied = matches!(reshape_action(x.meta.shape(), x.meta.strides(), &shape), ReshapeAction::Recompute);
        let rows = if is_copied { packed_rows(&x) } else { None };
        Self::float_reshape(rows.unwrap_or(x), shape)
    }

    fn evenly_spaced(x: &FloatTensor<Self>) -> Option<FloatTensor<Self>> {
        lt::evenly_spaced(x)
    }

    fn has_flash_attention(head_dim: usize, dtype: DType) -> bool {
        matches!(dtype, DType::BF16 | DType::F16) && [64, 96, 128, 192, 256].contains(&head_dim)
    }

    fn has_fp8(dtype: DType) -> bool {
        matches!(dtype, DType::BF16 | DType::F16)
    }

    fn is_dense(x: &FloatTensor<Self>) -> bool {
        x.is_contiguous()
    }

    fn gemm_and_bias([a, b, bias]: [FloatTensor<Self>; 3], dtype: DType) -> FloatTensor<Self> {
        let rows = a.meta.shape()[..a.meta.shape().num_dims() - 1].to_vec();
        let shape = Shape::from([rows, vec![bias.meta.shape().num_elements()]].concat());
        lt::gemm_and_bias(Operand::flat(a), Operand::batched(b), packed(bias), shape, dtype)
    }

    fn gemm(a: FloatTensor<Self>, b: FloatTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        let (left, right) = (a.meta.shape().to_vec(), b.meta.shape().to_vec());
        let lead = left.len() - 2;
        let is_half = |dtype| matches!(dtype, DType::BF16 | DType::F16);
        if dtype != a.dtype && !(is_half(a.dtype) && dtype == DType::F32) {
            return Self::float_cast(Self::gemm(a.clone(), b, a.dtype), dtype.into());
        }
        let shape = |lead: &[usize]| Shape::from([lead, &[left[left.len() - 2], right[right.len() - 1]]].concat());
        if right[..lead].iter().all(|size| *size == 1) {
            if let Some(out) = ops::times_small_matrix(&a, &b, dtype) {
                return out;
            }
            // One matrix for all: a single GEMM of all rows.
            return lt::gemm(Operand::flat(a), Operand::batched(b), shape(&left[..lead]), dtype);
        }
        if left[..lead] == right[..lead] {
            return lt::gemm(Operand::batched(a), Operand::batched(b), shape(&left[..lead]), dtype);
        }
        let common: Vec<usize> = left[..lead].iter().zip(&right[..lead]).map(|(a, b)| *a.max(b)).collect();
        let whole = |x: FloatTensor<Self>, own: &[usize]| {
            Self::float_expand(x, Shape::from([&common[..], &own[lead..]].concat()))
        };
        let (a, b) = (whole(a, &left), whole(b, &right));
        lt::gemm(Operand::batched(a), Operand::batched(b), shape(&common), dtype)
    }
}
