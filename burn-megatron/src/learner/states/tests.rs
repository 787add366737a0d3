use backend_dist::fully_shard::running_states;
use burn::nn::{BatchNorm, BatchNormConfig};
use burn::tensor::Device;

use super::*;

/// Running mean and variance.
fn statistics(norm: &BatchNorm) -> Vec<f64> {
    let read = |tensor: Tensor<1>| tensor.into_data().iter::<f64>().collect::<Vec<_>>();
    [read(norm.running_mean.value_sync()), read(norm.running_var.value_sync())].concat()
}

#[derive(Default)]
struct Ids(HashSet<ParamId>);

impl ModuleVisitor for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.insert(param.id);
    }
}

fn ids(norm: &BatchNorm) -> HashSet<ParamId> {
    let mut ids = Ids::default();
    norm.visit(&mut ids);
    ids.0
}

#[test]
fn own_states_keep_values_and_ids_and_no_other_module_changes_them() {
    let device = Device::flex().autodiff();
    let new = || BatchNormConfig::new(3).init(&device);
    let forward = |norm: &BatchNorm| {
        let images: Tensor<1> =
            Tensor::from_floats(std::array::from_fn::<f32, 24, _>(|at| (at * at % 7) as f32), &device);
        drop(norm.forward(images.reshape([2, 3, 2, 2])));
    };
    let norm = new();
    forward(&norm);
    let own = with_own_states(&norm);
    let before = statistics(&norm);
    assert_ne!(before, statistics(&new()));
    assert_eq!(
        (statistics(&own), ids(&own), running_states(&own)),
        (before.clone(), ids(&norm), running_states(&norm))
    );
    forward(&own);
    assert_eq!(statistics(&norm), before);
    assert_ne!(statistics(&own), before);
    // A clone shares them: without this there would be nothing to do here.
    forward(&norm.clone());
    assert_ne!(statistics(&norm), before);
}
