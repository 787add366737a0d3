//! For optimizers that step all parameters together, as Burn's `LBFGS`: whole gradients on every rank, and back to shards.

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::FullyShard;
use super::owners::Owners;
use super::place::stand_in;
use crate::local::{Placements, to_local};
use crate::paths::PathVisitor;

impl FullyShard {
    /// The gradients that [`end_pass`](Self::end_pass) gave, of all parameters on every rank. Every rank must call it.
    ///
    /// With them, and with the mean of the ranks' losses, `LBFGS` takes the same step on every rank, as on one device. Its history is
    /// whole on every rank, and so are the values that it has stepped until [`release`](Self::release).
    pub fn gather_gradients<M: Module>(&self, module: &M, grads: GradientsParams) -> GradientsParams {
        let has_gradient = HasGradient { shards: self, grads: &grads, found: vec![false; self.gathers.len()] };
        let own = has_gradient.walk(module).found;
        let all = self.gathers.group().all_gather_host(own);
        let used = (0..self.gathers.len()).map(|index| all.iter().any(|rank| rank[index])).collect();
        Gather { shards: self, used, grads }.walk(module).grads
    }

    /// `module`, all of whose values an optimizer has stepped on every rank, with its parameters on their owners alone.
    pub fn release<M: Module>(&self, module: M) -> M {
        let rank = self.gathers.group().rank();
        module.map(&mut Release { owners: &self.owners, rank })
    }
}

/// Which parameters of this rank have a gradient.
struct HasGradient<'a> {
    shards: &'a FullyShard,
    grads: &'a GradientsParams,
    found: Vec<bool>,
}

impl PathVisitor for HasGradient<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if let Some(&index) = self.shards.indices.get(path) {
            self.found[index] = self.grads.get::<D>(param.id).is_some();
        }
    }
}

struct Gather<'a> {
    shards: &'a FullyShard,
    /// Which parameters have a gradient on their owner.
    used: Vec<bool>,
    grads: GradientsParams,
}

impl PathVisitor for Gather<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        let Some(&index) = self.shards.indices.get(path).filter(|index| self.used[**index]) else { return };
        let base = param.base().without_autodiff();
        let placements = Placements::of(&base);
        let own = self.grads.remove::<D>(param.id).filter(|_| self.shards.gathers.is_owner(index));
        let held = match own {
            Some(gradient) => to_local(gradient).flatten(0, D - 1),
            None => Tensor::zeros([1], (&to_local(base.clone()).device(), base.dtype())),
        };
        let whole = self.shards.gathers.whole_of(index, held).reshape(placements.local_shape(base.shape()));
        self.grads.register::<D>(param.id, placements.from_local(whole));
    }
}

struct Release<'a> {
    owners: &'a Owners,
    rank: usize,
}

impl ModuleMapper for Release<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.owners.owner(param.id) {
            Some(owner) if owner != self.rank => param.map(|value| stand_in(&value, None)),
            _ => param,
        }
    }
}

#[cfg(test)]
mod tests {
    use burn::nn::{Linear, LinearConfig};
    use burn::optim::{LBFGS, LBFGSConfig, LineSearchFn};
    use burn::tensor::{DType, Device, FloatDType};
    use ranks::collective::all_reduce;
    use ranks::comm::{Group, ReduceOp};
    use ranks::launch::launch;
    use ranks::mesh::{Axis, Mesh};

    use super::*;
    use crate::fully_shard::{Counts, Units};

    #[derive(Module, Debug)]
    struct Net {
        layers: Vec<Linear>,
        frozen: Linear,
    }

    impl Net {
        /// The mean over rows `from` to `to` of eight.
        fn loss(&self, from: usize, to: usize) -> Tensor<1> {
            let device = self.layers[0].weight.device();
            let x = Tensor::<1>::from_data(
                (0..24).map(|i| (i as f64 * 0.7).sin()).collect::<Vec<_>>().as_slice(),
                (&device, DType::F64),
            );
            let x = x.reshape([8, 3]).slice([from..to]);
            let y = self.layers.iter().fold(x.clone(), |y, layer| layer.forward(y).tanh());
            (self.frozen.forward(y) - x.sum_dim(1)).powi_scalar(2).mean()
        }

        fn values(&self) -> Vec<f64> {
            let of = |layer: &Linear| layer.weight.val().into_data().iter::<f64>().collect::<Vec<_>>();
            self.layers.iter().flat_map(of).collect()
        }
    }

    fn lbfgs() -> LBFGS {
        LBFGSConfig::new().with_line_search_fn(LineSearchFn::StrongWolfe).with_max_iter(3).init()
    }

    #[test]
    fn lbfgs_steps_shards_as_one_device() {
        let device = Device::flex().autodiff().gradient_checkpointing();
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(&device);
        let net = Net { layers: vec![linear(3, 4), linear(4, 2)], frozen: linear(2, 1).no_grad() };
        let net = net.map(&mut Wide);
        let (mut one, mut optimizer) = (net.clone(), lbfgs());
        for _ in 0..2 {
            let closure = |net: Net| {
                let loss = net.loss(0, 8);
                (loss.clone().into_scalar::<f64>(), GradientsParams::from_grads(loss.backward(), &net))
            };
            one = optimizer.step(1.0, one, closure).0;
        }
        assert!(net.values() != one.values());
        let ranks = launch(&Mesh::new("DP2".parse().unwrap()).unwrap(), &[Device::flex()], |rank| {
            let group = rank.group(Axis::Dp);
            let shards = FullyShard::new(&net, &group, &Units::auto().keep_below(2));
            let (mut net, mut optimizer) = (shards.shard(net.clone().fork(&device)), lbfgs());
            let mean = |loss: &Tensor<1>, group: &Group| {
                all_reduce(loss.clone().inner(), ReduceOp::Sum, group).into_scalar::<f64>() / group.size() as f64
            };
            for _ in 0..2 {
                let closure = |net: Net| {
                    shards.begin_pass(&net);
                    let loss = net.loss(group.rank() * 4, group.rank() * 4 + 4);
                    let mean = mean(&loss, &group);
                    let grads = shards.end_pass(&net, GradientsParams::from_grads(loss.backward(), &net));
                    let gathered = shards.take_counts();
                    let grads = shards.gather_gradients(&net, grads);
                    // Gradients are no values.
                    assert!(gathered.forward > 0 && shards.take_counts() == Counts::default());
                    (mean, grads)
                };
                net = shards.release(optimizer.step(1.0, net, closure).0);
            }
            let held =
                net.layers.iter().filter(|layer| !layer.weight.base().into_data().iter::<f64>().any(f64::is_nan));
            Ok((held.count(), net.values()))
        });
        for (held, values) in ranks.unwrap() {
            assert_eq!(held, 1, "each rank owns a layer");
            let worst = values.iter().zip(one.values()).map(|(found, one)| (found - one).abs()).fold(0.0, f64::max);
            assert!(worst < 1e-10, "{worst}");
        }
    }

    struct Wide;

    impl ModuleMapper for Wide {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| {
                let wide = Tensor::from_inner(value.clone().inner().cast(FloatDType::F64));
                let strategy = value.gradient_checkpointing_strategy().expect("the device has autodiff");
                wide.with_gradient_checkpointing_strategy(strategy).set_require_grad(value.is_require_grad())
            })
        }
    }
}
