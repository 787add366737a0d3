//! What a sharded module saves and loads is what the module does on one device.

use burn::nn::LinearLayout;

use super::*;
use crate::paths::PathVisitor;

#[test]
fn records_are_those_of_the_module_on_one_device() {
    let (net, other) = (Net::new(&device(), false), Net::new(&device(), false));
    let expected = values(&net);
    let found = launch(&data_parallel(2), &[device()], |rank| {
        let units = Units::auto().keep_below(0);
        let shards = FullyShard::new(&other, &rank.group(Axis::Dp), &units);
        let loaded = shards.shard(other.clone().fork(&device())).load_record(net.clone().into_record());
        let held = Held { shards: &shards, elements: 0 }.walk(&loaded);
        let whole = Net::new(&device(), false).load_record(loaded.clone().into_record());
        // Only member 1 gets the values; nobody can take what the other gets for them.
        shards.record_on(1);
        let last = Net::new(&device(), false).try_load_record(loaded.into_record());
        Ok((held.elements, values(&whole), last.ok().map(|last| values(&last))))
    });
    let total: usize = expected.iter().map(Vec::len).sum();
    let found = found.unwrap();
    assert_eq!(found.iter().map(|(held, ..)| held).sum::<usize>(), total);
    for (rank, (_, whole, last)) in found.iter().enumerate() {
        assert_eq!(whole, &expected);
        assert_eq!(last.as_ref(), (rank == 1).then_some(&expected));
    }
}

/// burn-nn's `LinearLayout::Col` saves the transposed weight.
#[test]
fn a_parameter_that_is_saved_in_another_shape_keeps_its_own_mappers() {
    for outputs in [8, 3] {
        let layer = || LinearConfig::new(8, outputs).with_layout(LinearLayout::Col).init(&device());
        let (linear, other) = (layer(), layer());
        let value = |linear: Linear| linear.weight.val().into_data();
        let expected = value(linear.clone());
        let found = launch(&data_parallel(2), &[device()], |rank| {
            let shards = FullyShard::new(&linear, &rank.group(Axis::Dp), &Units::auto().keep_below(0));
            let saved = layer().load_record(shards.shard(linear.clone().fork(&device())).into_record());
            // Burn loads no parameter that has a value in another shape than it is saved in.
            let loaded =
                if outputs == 8 { shards.shard(other.clone().fork(&device())) } else { return Ok(vec![value(saved)]) };
            let loaded = loaded.load_record(linear.clone().into_record()).materialize();
            Ok(vec![value(saved), value(loaded)])
        });
        for rank in found.unwrap() {
            assert!(rank.iter().all(|found| *found == expected), "{outputs} outputs");
        }
    }
}

/// Elements of the values that this rank owns.
struct Held<'a> {
    shards: &'a FullyShard,
    elements: usize,
}

impl PathVisitor for Held<'_> {
    fn visit<const D: usize>(&mut self, path: &str, param: &Param<Tensor<D>>) {
        if self.shards.gathers.is_owner(self.shards.indices[path]) {
            self.elements += param.base().shape().num_elements();
        }
    }
}
