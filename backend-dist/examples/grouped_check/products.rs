//! A product of groups in one of the ways there are.
use backend_dist::ops::grouped::{self, Way};
use burn::backend::Cube;
use burn::tensor::{DType, Tensor};
use kernels_cubecl::grouped::{GroupedCall, GroupedPlan, Onto, Product};
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

    /// Of a product.
    pub fn flops(&self) -> f64 {
        2.0 * self.rows() as f64 * (self.features * self.inner) as f64
    }
}

/// A product and where its result goes.
pub type What = (Product, Onto);

pub const ALL: [What; 5] = [
    (Product::Forward, Onto::Same),
    (Product::InputGradient, Onto::Same),
    (Product::WeightGradient, Onto::Same),
    (Product::WeightGradient, Onto::Wide),
    (Product::WeightGradient, Onto::Added),
];

/// How it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// As models have it.
    Chosen,
    /// A cuBLASLt product for each group.
    Loop,
    /// The kernel with tiles of 256 columns.
    Wide,
    /// The kernel with tiles of 256 columns, more of them on their way to memory and less on the way from there.
    Roomy,
    /// The kernel with tiles of 128 columns, two cubes a multiprocessor.
    Paired,
    /// The kernel with tiles of 256 columns that bring nearer what they are added to.
    Ahead,
}

/// Shape of the result.
pub fn result(layer: &Layer, product: Product) -> [usize; 2] {
    match product {
        Product::Forward => [layer.rows(), layer.features],
        Product::InputGradient => [layer.rows(), layer.inner],
        Product::WeightGradient => layer.matrices(),
    }
}

/// Writes the product, or adds it, to `out`; returns where it went, which is another tensor unless `out` is fp32.
pub fn multiply(layer: &Layer, (product, onto): What, how: How, [left, right, out]: [&Tensor<2>; 3]) -> Tensor<2> {
    let plan = match how {
        How::Wide => GroupedPlan::wide,
        How::Roomy => GroupedPlan::roomy,
        How::Paired => GroupedPlan::paired,
        How::Ahead => GroupedPlan::ahead,
        _ => {
            let way = (how == How::Loop).then_some(Way::Loop);
            let (left, right) = (left.clone(), right.clone());
            return match (product, onto) {
                (Product::Forward, _) => grouped::forward(left, right, &layer.counts, way),
                (Product::InputGradient, _) => grouped::input_gradient(left, right, &layer.counts, way),
                (_, Onto::Same) => grouped::weight_gradient(left, right, &layer.counts, way),
                (_, onto) => {
                    let add = onto == Onto::Added;
                    grouped::accumulate_weight_gradient(left, right, &layer.counts, out, add, way);
                    out.clone()
                }
            };
        }
    };
    let element = if left.dtype() == DType::F16 { Half::F16 } else { Half::Bf16 };
    let call = GroupedCall { counts: &layer.counts, features: layer.features, inner: layer.inner, element };
    let of = |x: &Tensor<2>| x.clone().try_into_primitive::<Cube>().expect("a tensor on a GPU");
    let [left, right, out_handle] = [left, right, out].map(of);
    call.launch(&left.client, [&left.handle, &right.handle, &out_handle.handle], plan(product, element, onto))
        .unwrap_or_else(|error| panic!("{layer:?} {product:?}: {error}"));
    out.clone()
}
