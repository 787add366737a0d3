//! An LSTM, whose gates are sharded by columns.

use crate::harness::{Case, LAYOUTS, tensor};
use backend_dist::parallelize::Plan;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig, Lstm, LstmConfig};
use burn::tensor::Device;

#[derive(Module, Debug)]
struct Recurrent {
    lstm: Lstm,
    out: Linear,
}

#[test]
fn a_recurrent_network_by_columns() {
    let case = Case::<Recurrent> {
        init: |device: &Device| Recurrent {
            lstm: LstmConfig::new(8, 8, true).init(device),
            out: LinearConfig::new(8, 4).init(device),
        },
        loss: |model, device, _| {
            let (y, _) = model.lstm.forward(tensor([4, 5, 8], 1, device), None);
            model.out.forward(y).powf_scalar(2.0).mean()
        },
    };
    for layout in LAYOUTS {
        case.check(layout, &Plan::default().columns("lstm").rows("out.weight"));
    }
}
