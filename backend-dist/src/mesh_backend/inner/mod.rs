//! What the decorator needs of the backend below it.

#[cfg(feature = "cuda")]
mod cube;

use super::executor::{Launch, Limits, Written};
use burn::backend::tensor::{Device, FloatTensor};
use burn::backend::{Flex, TensorMetadata, flex::FlexTensor, ops::FloatTensorOps};
use burn::tensor::{DType, Shape, TensorData};
use burn_ir::{BackendIr, HandleKind};
use kernels_cubecl::fused::{row_fits, rows_can_be_summed};
use ops::fp8::Fp8Kernels;
use ops::{LocalKernels, MaskedAttentionKernels};
use ranks::collective_ops::{Collective, CollectiveOps};
use ranks::comm::Group;

/// A backend that runs a rank's share of every operation.
pub(super) trait Inner: BackendIr + CollectiveOps + Fp8Kernels + LocalKernels + MaskedAttentionKernels {
    /// The tensor in memory of its own: a slice may be a view that keeps all of what it is a slice of.
    fn owned(x: HandleKind<Self>) -> HandleKind<Self> {
        x
    }

    /// Which operations may run together as one kernel.
    fn chains(autocast: bool) -> Limits;
    /// Whether that is faster than one kernel each.
    const FUSES: bool;

    /// The outputs of a chain; `half` is the half precision type.
    fn fused(launch: Launch<FloatTensor<Self>>, half: DType, device: &Device<Self>) -> Vec<FloatTensor<Self>>;

    /// Runs `work`, whose allocations are kept for others of their size once they are free.
    fn keeping_memory<T: Send>(_: &Device<Self>, work: impl FnOnce() -> T + Send) -> T {
        work()
    }

    /// Lets the device begin with what is queued, without a wait for it.
    fn hand_over(_: &Device<Self>) {}

    /// Whether collectives over `group` continue while the device computes.
    fn is_async(_: &Group) -> bool {
        false
    }

    /// Begins collectives, where they [are](Self::is_async). What is returned with their results must be dropped before the
    /// results are used.
    fn begin_async(
        _: Vec<(FloatTensor<Self>, Collective)>,
        _mean: bool,
        group: &Group,
    ) -> (Vec<FloatTensor<Self>>, Box<dyn Send>) {
        unreachable!("collectives over {group:?} are waited for")
    }

    /// A collective by DMA copy engines, which leave the device to what `meanwhile` queues, given the bytes that a rank
    /// receives. `None`, and nothing has begun, if there is none for it.
    fn collective_by_dma(
        _: &FloatTensor<Self>,
        _: &Collective,
        _: &Group,
        _meanwhile: &mut dyn FnMut(usize),
    ) -> Option<FloatTensor<Self>> {
        None
    }

    /// A gather that is on its way; whoever drops it may read what it has gathered.
    type Arriving: Send;

    /// Begins to gather `x` along its first dimension, if GEMMs can begin with what is there. The result is not to be read
    /// before the gather is dropped.
    fn begin_gather(x: &FloatTensor<Self>, group: &Group) -> Option<(FloatTensor<Self>, Self::Arriving)>;

    /// [`gemm`](Self::gemm) of what is gathered with the weight of a layer, and with its bias.
    fn gemm_of_arriving(x: Self::Arriving, b: FloatTensor<Self>, bias: Option<FloatTensor<Self>>) -> FloatTensor<Self>;

    /// An all-reduce, or a reduce-scatter of the first dimension, of `a · b` plus a bias, where `b` is the weight of a layer.
    /// Parts of it travel while others are computed. `None`, and nothing has begun, if there is none. `meanwhile` as above.
    fn gemm_and_collective(
        operands: (FloatTensor<Self>, FloatTensor<Self>, Option<FloatTensor<Self>>),
        what: &Collective,
        group: &Group,
        meanwhile: &mut dyn FnMut(usize),
    ) -> Option<FloatTensor<Self>>;

    /// Sums over all dimensions but the last, of half precision in `dtype`.
    fn sum_rows(x: FloatTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        Self::bias_grad(Self::float_cast(x, dtype.into()))
    }

    /// The tensor in another shape.
    fn reshaped(x: FloatTensor<Self>, shape: Shape) -> FloatTensor<Self> {
        Self::float_reshape(x, shape)
    }

    /// A copy of `x` whose matrices of the last two dimensions [`gemm`](Self::gemm) reads in place; `None` if it reads those
    /// of `x` so.
    fn evenly_spaced(_: &FloatTensor<Self>) -> Option<FloatTensor<Self>> {
        None
    }

    /// Whether attention in `dtype` with heads of this size has a kernel that is faster than its GEMMs.
    fn has_flash_attention(_head_dim: usize, _: DType) -> bool {
        true
    }

    /// Whether GEMMs of this type can be in FP8.
    fn has_fp8(dtype: DType) -> bool;

    /// Whether the elements lie in memory as they are counted.
    fn is_dense(x: &FloatTensor<Self>) -> bool;

    /// [`gemm`](Self::gemm) with the weight of a layer, whose bias is added to every row; all have one type.
    fn gemm_and_bias([a, b, bias]: [FloatTensor<Self>; 3], dtype: DType) -> FloatTensor<Self> {
        let y = Self::gemm(a, b, dtype);
        let ones = vec![1; y.shape().num_dims() - 1];
        let columns = bias.shape().num_elements();
        Self::float_add(y, Self::float_reshape(bias, Shape::from([ones, vec![columns]].concat())))
    }

    /// `a · b` of the last two dimensions with elements of `dtype`; the others broadcast. `a` and `b` have one type.
    fn gemm(a: FloatTensor<Self>, b: FloatTensor<Self>, dtype: DType) -> FloatTensor<Self> {
        Self::float_cast(Self::float_matmul(a, b), dtype.into())
    }
}

impl Inner for Flex {
    fn owned(x: HandleKind<Self>) -> HandleKind<Self> {
        let owned = |x: FlexTensor| FlexTensor::from_data(x.into_data());
        match x {
            HandleKind::Float(x) => HandleKind::Float(owned(x)),
            HandleKind::Int(x) => HandleKind::Int(owned(x)),
            HandleKind::Bool(x) => HandleKind::Bool(owned(x)),
            quantized @ HandleKind::Quantized(_) => quantized,
        }
    }

    /// What was gathered: nothing is on its way.
    type Arriving = FlexTensor;

    fn begin_gather(x: &FlexTensor, group: &Group) -> Option<(FlexTensor, FlexTensor)> {
        let whole = Self::collective(x.clone(), Collective::AllGather(0), None, group.clone());
        Some((whole.clone(), whole))
    }

    fn gemm_of_arriving(x: FlexTensor, b: FlexTensor, bias: Option<FlexTensor>) -> FlexTensor {
        let dtype = x.dtype();
        match bias {
            Some(bias) => Self::gemm_and_bias([x, b, bias], dtype),
            None => Self::gemm(x, b, dtype),
        }
    }

    fn gemm_and_collective(
        (a, b, bias): (FlexTensor, FlexTensor, Option<FlexTensor>),
        what: &Collective,
        group: &Group,
        _: &mut dyn FnMut(usize),
    ) -> Option<FlexTensor> {
        Some(Self::collective(Self::gemm_of_arriving(a, b, bias), what.clone(), None, group.clone()))
    }

    const FUSES: bool = false;

    /// Emulated.
    fn has_fp8(_: DType) -> bool {
        true
    }

    fn is_dense(x: &FlexTensor) -> bool {
        x.layout().is_contiguous()
    }

    fn chains(autocast: bool) -> Limits {
        let dtype = if autocast { DType::F32 } else { DType::F64 };
        // The rows of GPUs, so that what tests run here is what runs there.
        Limits { dtype, fits: row_fits, sums: rows_can_be_summed, elements: usize::MAX }
    }

    fn fused(launch: Launch<FloatTensor<Self>>, half: DType, device: &Device<Self>) -> Vec<FloatTensor<Self>> {
        let dtype = launch.dtype;
        let read = |x| -> Vec<f64> {
            let data = burn_std::future::block_on(Flex::float_into_data(x));
            data.unwrap_or_else(|error| panic!("reading a tensor: {error}")).iter().collect()
        };
        let inputs: Vec<Vec<f64>> = launch.inputs.into_iter().map(read).collect();
        let inputs: Vec<&[f64]> = inputs.iter().map(Vec::as_slice).collect();
        let size = (launch.rows, launch.columns);
        let values = launch.program.evaluate(&inputs, &launch.shares, &launch.scalars, &launch.draws, size);
        let outputs = values.into_iter().zip(launch.outputs);
        let tensor = |(values, Written { shape, is_half, .. })| {
            let dtype = if is_half { half } else { dtype };
            Flex::float_from_data(TensorData::new(values, shape).convert_dtype(dtype), device)
        };
        outputs.map(tensor).collect()
    }
}
