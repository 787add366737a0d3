//! A small regression with parameters that not all batches use, and its data.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn::train::{InferenceStep, RegressionOutput, TrainOutput, TrainStep};

const INPUTS: usize = 3;

#[derive(Clone, Debug)]
pub struct Row {
    x: [f64; INPUTS],
    y: f64,
}

struct Rows(DType);

pub type Batch = (Tensor<2>, Tensor<2>);

impl Batcher<Row, Batch> for Rows {
    fn batch(&self, rows: Vec<Row>, device: &Device) -> Batch {
        let count = rows.len();
        let x: Vec<f64> = rows.iter().flat_map(|row| row.x).collect();
        let y: Vec<f64> = rows.iter().map(|row| row.y).collect();
        let tensor = |values, width| Tensor::from_data(TensorData::new(values, [count, width]), (device, self.0));
        (tensor(x, INPUTS), tensor(y, 1))
    }
}

pub fn loader(count: usize, batch: usize, dtype: DType) -> Arc<dyn DataLoader<Batch>> {
    let wave = |i: usize, j: usize| ((i * (j + 3)) as f64 * 0.7).sin();
    let row = |i: usize| {
        let x = [wave(i, 0), wave(i, 1), wave(i, 2)];
        Row { x, y: x[0] * x[1] - 0.5 * x[2] }
    };
    let rows: Vec<Row> = (0..count).map(row).collect();
    DataLoaderBuilder::new(Rows(dtype)).batch_size(batch).build(InMemDataset::new(rows))
}

/// Parameters of many sizes, one that no batch uses and one that only some batches use.
#[derive(Module, Debug)]
pub struct Net {
    pub first: Param<Tensor<2>>,
    bias: Param<Tensor<1>>,
    second: Param<Tensor<2>>,
    third: Param<Tensor<2>>,
    never: Param<Tensor<2>>,
    sometimes: Param<Tensor<2>>,
}

impl Net {
    pub fn new(device: &Device, dtype: DType) -> Self {
        fn param<const D: usize>(shape: [usize; D], device: &Device, dtype: DType) -> Param<Tensor<D>> {
            let values = (0..shape.iter().product()).map(|i: usize| ((i * 37 % 23) as f64 - 11.0) / 20.0).collect();
            Param::from_tensor(Tensor::from_data(TensorData::new::<f64, _>(values, shape), (device, dtype)))
        }
        let matrix = |rows, columns| param([rows, columns], device, dtype);
        Self {
            first: matrix(INPUTS, 8),
            bias: param([8], device, dtype),
            second: matrix(8, 6),
            third: matrix(6, 1),
            never: matrix(5, 4),
            sometimes: matrix(1, 1),
        }
    }

    fn forward(&self, (x, y): Batch) -> RegressionOutput {
        let hidden = (x.clone().matmul(self.first.val()) + self.bias.val().unsqueeze()).tanh();
        let mut predicted = hidden.matmul(self.second.val()).tanh().matmul(self.third.val());
        if x.inner().sum().into_data().iter::<f64>().next().unwrap() > 0.0 {
            predicted = predicted.matmul(self.sometimes.val());
        }
        let loss = (predicted.clone() - y.clone()).powi_scalar(2).mean();
        RegressionOutput::new(loss, predicted, y)
    }

    /// In the order in which the module is visited.
    pub fn weights(&self) -> Vec<Vec<f64>> {
        let read = |data: TensorData| data.iter::<f64>().collect();
        let mut weights: Vec<Vec<f64>> = vec![read(self.first.val().into_data()), read(self.bias.val().into_data())];
        for param in [&self.second, &self.third, &self.never, &self.sometimes] {
            weights.push(read(param.val().into_data()));
        }
        weights
    }
}

pub const NEVER: usize = 4;
pub const SOMETIMES: usize = 5;

impl TrainStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, batch: Batch) -> TrainOutput<RegressionOutput> {
        let output = self.forward(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl InferenceStep for Net {
    type Input = Batch;
    type Output = RegressionOutput;

    fn step(&self, (x, y): Batch) -> RegressionOutput {
        RegressionOutput::new(Tensor::zeros([1], &x.device()), y.clone(), y)
    }
}
