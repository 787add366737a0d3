//! One grouped GEMM by each of the methods.
use backend_dist::ops::grouped;
use burn::backend::Cube;
use burn::tensor::{DType, Device, Distribution, Tensor, TensorData};
use kernels_cubecl::grouped::{Epilogue, Gemm, GroupedCall, GroupedPlan};
use kernels_cubecl::hopper::mma::Half;

/// Sizes of a layer.
#[derive(Clone, Debug)]
pub struct Layer {
    pub counts: Vec<usize>,
    pub features: usize,
    pub inner: usize,
}

impl Layer {
    pub fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    pub fn matrices(&self) -> [usize; 2] {
        [self.counts.len() * self.features, self.inner]
    }

    /// Of one GEMM.
    pub fn flops(&self) -> f64 {
        2.0 * self.rows() as f64 * (self.features * self.inner) as f64
    }
}

/// A GEMM and its epilogue.
pub type GroupedGemm = (Gemm, Epilogue);

pub const ALL: [GroupedGemm; 5] = [
    (Gemm::Forward, Epilogue::InputType),
    (Gemm::InputGradient, Epilogue::InputType),
    (Gemm::WeightGradient, Epilogue::InputType),
    (Gemm::WeightGradient, Epilogue::Fp32),
    (Gemm::WeightGradient, Epilogue::AddFp32),
];

/// Methods to compute a grouped GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// The one that the library chooses.
    Default,
    /// A cuBLASLt GEMM for each group.
    Loop,
    /// The kernel with tiles of 256 columns.
    Wide,
    /// The kernel with tiles of 192 columns.
    Narrow,
    /// The kernel with tiles of 256 columns, more staging memory and fewer stages of operands.
    WideStaging,
    /// The kernel with tiles of 128 columns, two cubes per SM.
    Paired,
}

/// Shapes of both operands and of the result.
pub fn shapes(layer: &Layer, gemm: Gemm) -> [[usize; 2]; 3] {
    let (x, y, w) = ([layer.rows(), layer.inner], [layer.rows(), layer.features], layer.matrices());
    match gemm {
        Gemm::Forward => [x, w, y],
        Gemm::InputGradient => [y, w, x],
        Gemm::WeightGradient => [y, x, w],
    }
}

/// A matrix of these numbers; a tensor that is created as a matrix may have gaps between its rows.
pub fn matrix(values: Vec<f64>, shape: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    let data = TensorData::new(values, [shape[0] * shape[1]]);
    Tensor::<1>::from_data(data, (device, dtype)).reshape(shape)
}

/// The same with random numbers.
pub fn random(shape: [usize; 2], device: &Device, dtype: DType) -> Tensor<2> {
    Tensor::<1>::random([shape[0] * shape[1]], Distribution::Normal(0.0, 1.0), (device, dtype)).reshape(shape)
}

/// Writes the GEMM, or adds it, to `out`; returns the tensor with the result, which is not `out` unless that is fp32.
pub fn multiply(
    layer: &Layer,
    (gemm, epilogue): GroupedGemm,
    method: Method,
    [left, right, out]: [&Tensor<2>; 3],
) -> Tensor<2> {
    let plan = match method {
        Method::Wide => GroupedPlan::wide,
        Method::Narrow => GroupedPlan::narrow,
        Method::WideStaging => GroupedPlan::wide_staging,
        Method::Paired => GroupedPlan::paired,
        _ => {
            let way = (method == Method::Loop).then_some(grouped::Method::Loop);
            let (left, right) = (left.clone(), right.clone());
            return match (gemm, epilogue) {
                (Gemm::Forward, _) => grouped::forward(left, right, &layer.counts, way),
                (Gemm::InputGradient, _) => grouped::input_gradient(left, right, &layer.counts, way),
                (_, Epilogue::InputType) => grouped::weight_gradient(left, right, &layer.counts, way),
                (_, epilogue) => {
                    let add = epilogue == Epilogue::AddFp32;
                    grouped::accumulate_weight_gradient(left, right, &layer.counts, out, add, way);
                    out.clone()
                }
            };
        }
    };
    let element = if left.dtype() == DType::F16 { Half::F16 } else { Half::Bf16 };
    let call = GroupedCall { counts: &layer.counts, features: layer.features, inner: layer.inner, element, waves: 1 };
    let of = |x: &Tensor<2>| x.clone().try_into_primitive::<Cube>().expect("a tensor on a GPU");
    let [left, right, out_handle] = [left, right, out].map(of);
    call.launch(&left.client, [&left.handle, &right.handle, &out_handle.handle], plan(gemm, element, epilogue))
        .unwrap_or_else(|error| panic!("{layer:?} {gemm:?}: {error}"));
    out.clone()
}
