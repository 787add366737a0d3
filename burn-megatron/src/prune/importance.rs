//! How important layers, heads, neurons and features are for calibration texts.

use backend_dist::launch::BoxError;
use models::LlamaConfig;
use models::observer::Moments;

use super::keep::{Importance, Kept};
use super::weights::Pruned;
use crate::calibrate::Calibration;
use crate::hf::HfFolder;

/// The loss of a model on the calibration texts.
pub type Loss<'a> = dyn FnMut(&Pruned) -> Result<f64, BoxError> + 'a;

/// The importance of all parts of a model of Llama's family whose weights are `folder`'s; that of layers by `loss`, if
/// it is given, which gets the weights of a model without one of them. Fails if the model cannot compute.
pub fn importance(
    calibration: &Calibration,
    (model, folder): (&LlamaConfig, &HfFolder),
    loss: Option<&mut Loss>,
) -> Result<Importance, BoxError> {
    let sums = calibration.observe(Moments::Squares, 0..model.num_hidden_layers)?;
    let of = |layer: usize, name: &str| -> Result<&[f64], BoxError> {
        let name = format!("layers.{layer}.{name}");
        let sum = sums.get(&name).ok_or_else(|| format!("{name} records no inputs"))?;
        Ok(&sum.data)
    };
    let mut importance = Importance { hidden: vec![0.0; model.hidden_size], ..Importance::default() };
    let group = model.num_attention_heads / model.num_key_value_heads * model.head_dim;
    for layer in 0..model.num_hidden_layers {
        for name in ["attention.q_proj", "mlp.gate_proj"] {
            importance.hidden.iter_mut().zip(of(layer, name)?).for_each(|(sum, squares)| *sum += squares);
        }
        importance.intermediate.push(of(layer, "mlp.down_proj")?.to_vec());
        let heads = of(layer, "attention.o_proj")?;
        importance.groups.push(heads.chunks_exact(group).map(|squares| squares.iter().sum()).collect());
    }
    if let Some(loss) = loss {
        for layer in 0..model.num_hidden_layers {
            importance.layers.push(loss(&Pruned::new(folder, model, Kept::without_layer(model, layer))?)?);
        }
    }
    Ok(importance)
}
