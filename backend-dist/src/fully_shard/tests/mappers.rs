//! Mappers of a program change what a rank owns.

use super::*;

/// As the WGAN of Burn's examples clips the weights of its critic: with new leaves, which have no gradient checkpointing.
struct Clip;

impl ModuleMapper for Clip {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| Tensor::from_inner(value.inner().clamp(-0.3, 0.3)).require_grad())
    }
}

fn trained(mut model: Linear, device: &Device) -> Linear {
    for _ in 0..3 {
        let loss = -model.forward(Tensor::<2>::ones([1, 4], device)).sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        model = sgd().step(0.1, model, grads).map(&mut Clip);
    }
    model
}

#[test]
fn weights_are_clipped_as_on_one_device() {
    let one = Device::flex().autodiff();
    let model = LinearConfig::new(4, 3).init(&one);
    let expected = trained(model.clone(), &one).weight.val().into_data();
    assert!(expected.iter::<f64>().any(|value| value.abs() > 0.29), "nothing was clipped");
    let ranks = launch(&data_parallel(2), &[Device::flex()], |rank| {
        let model = LinearConfig::new(4, 3).init(&device()).load_record(model.clone().into_record());
        let model = fully_shard(model, &rank.group(Axis::Dp), &Units::auto().keep_below(0));
        Ok(trained(model, &device()).weight.val().into_data())
    });
    assert_eq!(ranks.unwrap(), [expected.clone(), expected]);
}
