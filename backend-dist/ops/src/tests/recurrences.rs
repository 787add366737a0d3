//! A recurrence in chunks against its definition, position by position.

use burn::tensor::{DType, Device, Tensor, TensorData};

/// Outputs and gradients by name.
pub type Results = Vec<(&'static str, Vec<f64>)>;

/// Noise that records gradients.
pub fn noise<const D: usize>(seed: f64, shape: [usize; D]) -> Tensor<D> {
    let value = |i: usize| ((i as f64 * 12.9898 + seed).sin() * 43758.5453).fract() * 2.0;
    let values: Vec<f64> = (0..shape.iter().product()).map(value).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex().autodiff(), DType::F64)).require_grad()
}

/// The same values without a graph.
pub fn plain<const D: usize>(x: &Tensor<D>) -> Tensor<D> {
    Tensor::from_data(x.to_data(), (&Device::flex(), DType::F64))
}

pub fn host<const D: usize>(x: Tensor<D>) -> Vec<f64> {
    x.into_data().try_to_vec::<f64>().unwrap()
}

pub fn assert_close(what: &str, found: Vec<f64>, expected: Vec<f64>) {
    let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
    let gap = found.iter().zip(&expected).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
    assert!(found.len() == expected.len() && gap <= 1e-12 * largest, "{what}: {gap:e} of {largest:e}");
}

/// One position, less than a chunk, whole chunks, and a last chunk that is padded; documents at and next to the borders
/// of chunks. `given` makes the inputs of `seq` positions of `samples`, `chunked` takes them with their documents' ages,
/// and `by_position` with where documents begin.
pub fn chunks_are_the_recurrence<I>(
    given: impl Fn(usize, usize) -> I,
    chunked: impl Fn(&I, Option<Tensor<2>>) -> Results,
    by_position: impl Fn(&I, &[usize]) -> Results,
) {
    for (seq, samples, starts) in [
        (1, 2, vec![]),
        (2, 1, vec![1]),
        (40, 2, vec![]),
        (128, 1, vec![]),
        (200, 2, vec![]),
        (210, 2, vec![3, 64, 65, 130, 209]),
        (150, 1, vec![63, 149]),
    ] {
        let inputs = given(seq, samples);
        let age = |at: usize| at - starts.iter().copied().filter(|start| *start <= at).max().unwrap_or(0);
        let ages = (!starts.is_empty()).then(|| {
            let values: Vec<f32> = (0..seq).flat_map(|at| vec![age(at) as f32; samples]).collect();
            Tensor::from_data(TensorData::new(values, [seq, samples]), (&Device::flex().autodiff(), DType::F32))
        });
        let found = chunked(&inputs, ages);
        for ((name, found), (_, expected)) in found.into_iter().zip(by_position(&inputs, &starts)) {
            assert_close(&format!("{name} of {seq}, documents at {starts:?}"), found, expected);
        }
    }
}

/// The output and the gradients of all inputs: those with positions, and those of heads.
pub fn results<const N: usize, const M: usize>(
    y: Tensor<3>,
    inputs: [(&'static str, &Tensor<3>); N],
    of_heads: [(&'static str, &Tensor<1>); M],
) -> Results {
    let slope = noise(6.0, y.dims()).detach();
    let grads = (y.clone() * slope).sum().backward();
    let inputs = inputs.map(|(name, x)| (name, host(x.grad(&grads).unwrap())));
    let of_heads = of_heads.map(|(name, x)| (name, host(x.grad(&grads).unwrap())));
    [("y", host(y))].into_iter().chain(inputs).chain(of_heads).collect()
}

/// A sequence that is read in two parts: `with_states` takes the second one from the state behind the first, and
/// `by_position` either.
pub fn states_are_passed_on<I>(
    given: impl Fn(usize) -> I,
    with_states: impl Fn(&I, Tensor<4>) -> (Tensor<3>, Tensor<4>),
    by_position: impl Fn(&I, Option<Tensor<4>>) -> (Tensor<3>, Tensor<4>),
) {
    for seq in [1, 30, 100] {
        let inputs = given(seq);
        let (_, first) = by_position(&inputs, None);
        let (y, last) = with_states(&inputs, first.clone());
        let (expected, expected_last) = by_position(&inputs, Some(first));
        assert_close(&format!("y of {seq}"), host(y), host(expected));
        assert_close(&format!("state of {seq}"), host(last), host(expected_last));
    }
}
