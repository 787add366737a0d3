//! Adapted weights, `W + s A B` and `m / ‖W + s A B‖ (W + s A B)`, stay where the weights are: an adapted layer moves what
//! the layer moves.

use crate::sequence::{Case, encoder};
use backend_dist::mesh_backend::{Count, Report};
use burn::module::{Module, Param, Reparameterization, Reparameterizer};
use burn::nn::transformer::{TransformerEncoder, TransformerEncoderInput};
use burn::tensor::{Device, Tensor};

#[derive(Module, Debug)]
struct LowRank {
    a: Param<Tensor<2>>,
    b: Param<Tensor<2>>,
    magnitude: Option<Param<Tensor<1>>>,
}

impl Reparameterization for LowRank {
    const NAME: &'static str = "lora";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let sum = base.clone() + (self.a.val().matmul(self.b.val()) * 0.5).reshape(base.dims());
        match &self.magnitude {
            Some(magnitude) => {
                let norm = sum.clone().detach().square().sum_dim(0).sqrt();
                sum * (magnitude.val().unsqueeze::<D>() / norm)
            }
            None => sum,
        }
    }
}

/// All matrices get an adapter, and nothing else is trained.
struct Attach {
    has_magnitudes: bool,
}

impl Reparameterizer for Attach {
    type Reparam = LowRank;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LowRank>) {
        let param = param.set_require_grad(false);
        let base = param.base();
        let [input, out] = match base.dims()[..] {
            [input, out] => [input, out],
            _ => return (param, None),
        };
        let device = base.device();
        let matrix = |shape| Param::from_tensor(Tensor::<2>::ones(shape, (&device, base.dtype())));
        let magnitude =
            self.has_magnitudes.then(|| Param::from_tensor(Tensor::<1>::ones([out], (&device, base.dtype()))));
        (param, Some(LowRank { a: matrix([input, 3]), b: matrix([3, out]), magnitude }))
    }
}

fn encode(model: &TransformerEncoder, device: &Device) -> Tensor<3> {
    model.forward(TransformerEncoderInput::new(crate::harness::tensor([4, 8, 16], 3, device)))
}

fn reports(layout: &str) -> [Report; 3] {
    let lora = |device: &Device| encoder(device).apply_reparameterization(Attach { has_magnitudes: false });
    let dora = |device: &Device| encoder(device).apply_reparameterization(Attach { has_magnitudes: true });
    [encoder, lora, dora].map(|init: fn(&Device) -> TransformerEncoder| Case { init, encode }.check(layout).0)
}

/// Nothing is trained before the first block, so that its input needs no gradient: one collective less.
#[test]
fn adapted_weights_are_not_gathered() {
    let counts = |report: &Report, names: [&str; 3]| names.map(|name| report.collectives.get(name).copied());
    for layout in ["TP2 SP", "TP4 SP"] {
        let [plain, lora, dora] = reports(layout);
        assert!(lora.fallbacks.is_empty() && dora.fallbacks.is_empty(), "{layout}: {lora}{dora}");
        let moved = ["all-gather", "reduce-scatter", "all-to-all"];
        assert_eq!(counts(&lora, moved), counts(&dora, moved), "{layout}: {dora}");
        assert_eq!(lora.collectives["all-gather"], plain.collectives["all-gather"], "{layout}: {lora}");
        assert_eq!(lora.times("reduce-scatter"), plain.times("reduce-scatter") - 1, "{layout}: {lora}");
        assert_eq!((lora.times("all-to-all"), lora.times("all-reduce")), (0, 0), "{layout}: {lora}");
        // The norms of four matrices that are sharded by rows, and the gradients of their magnitudes: 16 numbers each.
        assert_eq!(dora.collectives["all-reduce"], Count { times: 8, bytes: 8 * 16 * 8 }, "{layout}: {dora}");
    }
    let [plain, lora, dora] = reports("TP2");
    assert_eq!(counts(&lora, ["all-gather", "reduce-scatter", "all-to-all"]), [None; 3], "{lora}");
    assert_eq!(lora.times("all-reduce"), plain.times("all-reduce") - 1, "{lora}");
    assert_eq!(dora.collectives["all-reduce"].bytes, lora.collectives["all-reduce"].bytes + 8 * 16 * 8, "{dora}");
}
