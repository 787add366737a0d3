//! The choice of tokens where their logits are, on NVIDIA GPUs.

use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor, tensor::IntTensor};
use burn::tensor::{DType, Device, Element, ElementConversion, Int, Tensor, TensorData};
pub use kernels_cubecl::decode::draw::{Draw, LogitChange, OWN};
use kernels_cubecl::decode::{draw::words, has_likeliest};

/// The only tokens that may come.
#[derive(Clone, Debug, PartialEq)]
pub struct OnlyTokens {
    /// Of this row.
    pub row: usize,
    /// Their bits, 64 tokens a word. Tokens behind the last do not come.
    pub bits: Vec<u64>,
}

/// Whether the functions of this module have kernels for these logits `[rows, columns]`: on NVIDIA GPUs, for columns that are
/// a multiple of 8.
pub fn is_drawn_on_device(logits: &Tensor<2>) -> bool {
    let known = matches!(logits.dtype(), DType::BF16 | DType::F16 | DType::F32);
    let [rows, columns] = logits.dims();
    let fits = has_likeliest(columns) && rows * columns <= i32::MAX as usize && rows <= u16::MAX as usize;
    known && fits && gpu::index(&logits.device()).is_some()
}

/// The first column of the greatest number of each row of `logits [rows, columns]`, or −1 if one of them is not finite.
///
/// # Panics
/// Unless [`is_drawn_on_device`].
pub fn likeliest(logits: &Tensor<2>) -> Tensor<1, Int> {
    Tensor::from_dispatch(<Dispatch as DrawOps>::op_likeliest(logits.clone().into_dispatch()))
}

/// A column of each row of `logits [rows, columns]`, drawn in fp32, or −1 if one of the row is not finite, or if none may
/// come.
///
/// # Panics
/// Unless [`is_drawn_on_device`], and there is a draw for each row.
pub fn draw(logits: &Tensor<2>, draws: &[Draw]) -> Tensor<1, Int> {
    assert_eq!(logits.dims()[0], draws.len(), "draws of {:?} logits", logits.dims());
    let how = floats(draws.iter().flat_map(Draw::numbers).collect(), &logits.device());
    Tensor::from_dispatch(<Dispatch as DrawOps>::op_draw(logits.clone().into_dispatch(), how.into_dispatch()))
}

/// `logits [rows, columns]` in fp32 with some of them changed, each by one change at most, and then without the tokens that
/// may not come. Only [`draw`] takes them.
///
/// # Panics
/// Unless [`is_drawn_on_device`], and all rows and tokens are those of `logits`.
pub fn changed(logits: &Tensor<2>, changes: &[LogitChange], only: &[OnlyTokens]) -> Tensor<2> {
    let ([rows, columns], device) = (logits.dims(), logits.device());
    let place = |of: &LogitChange| {
        assert!(of.row < rows && of.token < columns, "{of:?} of [{rows}, {columns}] logits");
        (of.row * columns + of.token) as i32
    };
    let places = ints(changes.iter().map(place).collect(), &device);
    let by = floats(changes.iter().flat_map(LogitChange::numbers).collect(), &device);
    let kept = ints(only.iter().map(|only| only.row as i32).collect(), &device);
    let mut bits = Vec::with_capacity(only.len() * words(columns));
    for OnlyTokens { row, bits: of_row } in only {
        assert!(*row < rows, "row {row} of [{rows}, {columns}] logits");
        let halves = of_row.iter().flat_map(|word| [*word as i32, (*word >> 32) as i32]);
        bits.extend(halves.chain(std::iter::repeat(0)).take(words(columns)));
    }
    let [places, kept, bits] = [places, kept, ints(bits, &device)].map(Tensor::into_dispatch);
    let (logits, by) = (logits.clone().into_dispatch(), by.into_dispatch());
    let counts = [changes.len(), only.len()];
    Tensor::from_dispatch(<Dispatch as DrawOps>::op_changed(logits, places, by, kept, bits, counts))
}

/// How likely a token of each row is, and which are likeliest: `[rows, OWN + 2 most]` in fp32, where `most` is the greatest
/// number of likeliest tokens that is asked for. The first numbers of a row are its greatest logit `m`, the sum of
/// `e^(logit − m)` over all, and the token's logit; then come the likeliest tokens and their logits, by turns, likeliest
/// first. A row asks for its `Some` token, or for that in `drawn [rows]`, and for so many likeliest; one that asks for
/// nothing, or whose drawn token is −1, has no meaning; where a logit is no number or +∞, the sum is no number.
///
/// # Panics
/// Unless [`is_drawn_on_device`], and there is a line of `asked` for each row, with tokens and numbers that the rows have.
pub fn likelihoods(logits: &Tensor<2>, drawn: &Tensor<1, Int>, asked: &[Option<(Option<usize>, usize)>]) -> Tensor<2> {
    let [rows, columns] = logits.dims();
    assert_eq!((rows, drawn.dims()), (asked.len(), [rows]), "what is asked of [{rows}, {columns}] logits");
    let numbers = |of: &Option<(Option<usize>, usize)>| {
        let Some((token, most)) = *of else { return [-1, -1] };
        assert!(token.is_none_or(|token| token < columns) && most <= columns, "{of:?} of {columns} logits");
        [token.map_or(-1, |token| token as i32), most as i32]
    };
    let most = asked.iter().flatten().map(|(_, most)| *most).max().unwrap_or(0);
    let asked = ints(asked.iter().flat_map(numbers).collect(), &logits.device());
    let [drawn, asked] = [drawn.clone(), asked].map(Tensor::into_dispatch);
    Tensor::from_dispatch(<Dispatch as DrawOps>::op_likelihoods(logits.clone().into_dispatch(), drawn, asked, most))
}

fn floats(numbers: Vec<f32>, device: &Device) -> Tensor<1> {
    Tensor::from_data(data(numbers), (device, DType::F32))
}

fn ints(numbers: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    Tensor::from_data(data(numbers), (device, DType::I32))
}

/// A buffer has one number at least.
fn data<E: Element>(mut numbers: Vec<E>) -> TensorData {
    if numbers.is_empty() {
        numbers.push(0.elem());
    }
    let count = numbers.len();
    TensorData::new(numbers, [count])
}

#[backend_extension(Flex, Cube: cfg(feature = "cuda"))]
pub(super) trait DrawOps: Backend {
    fn op_likeliest(logits: FloatTensor<Self>) -> IntTensor<Self>;

    fn op_draw(logits: FloatTensor<Self>, how: FloatTensor<Self>) -> IntTensor<Self>;

    fn op_changed(
        logits: FloatTensor<Self>,
        places: IntTensor<Self>,
        by: FloatTensor<Self>,
        kept: IntTensor<Self>,
        bits: IntTensor<Self>,
        counts: [usize; 2],
    ) -> FloatTensor<Self>;

    fn op_likelihoods(
        logits: FloatTensor<Self>,
        drawn: IntTensor<Self>,
        asked: IntTensor<Self>,
        most: usize,
    ) -> FloatTensor<Self>;
}

impl DrawOps for burn::backend::Flex {
    fn op_likeliest(_: FloatTensor<Self>) -> IntTensor<Self> {
        panic!("{ON_GPUS}")
    }

    fn op_draw(_: FloatTensor<Self>, _: FloatTensor<Self>) -> IntTensor<Self> {
        panic!("{ON_GPUS}")
    }

    fn op_changed(
        _: FloatTensor<Self>,
        _: IntTensor<Self>,
        _: FloatTensor<Self>,
        _: IntTensor<Self>,
        _: IntTensor<Self>,
        _: [usize; 2],
    ) -> FloatTensor<Self> {
        panic!("{ON_GPUS}")
    }

    fn op_likelihoods(_: FloatTensor<Self>, _: IntTensor<Self>, _: IntTensor<Self>, _: usize) -> FloatTensor<Self> {
        panic!("{ON_GPUS}")
    }
}

const ON_GPUS: &str = "tokens are chosen by kernels on GPUs only";
