//! Adapters of plain Burn modules. The weight of a layer is a parameter with a reparameterization: whoever reads it gets
//! the sum, so no layer knows of adapters, and they are in every layout that the module has.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use backend_dist::shard::HostTensor;
use burn::module::{Module, ModuleVisitor, Param, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Distribution, Gradients, Tensor, TensorData};

use super::plan::{LayerAdapter, PARTS};
use super::{Adapter, LoraConfig, LoraError, LoraPlan};
use crate::hf::{HfModule, ModuleNames};
use crate::names::{HostTensors, NameMap, fits};

/// What is added to a weight `W [in, out]` of Burn: `W + s A B`, and with magnitudes `m / ‖W + s A B‖` times that, the norm
/// of each column without gradient. `W` has no gradient.
///
/// A layer multiplies with the sum, so that a pass keeps one more matrix of the weight's size, and the backward pass makes
/// the gradient of the sum.
#[derive(Module, Debug)]
pub struct LowRank {
    /// `[in, r]`, the transpose of peft's `lora_A`.
    pub a: Param<Tensor<2>>,
    /// `[r, out]`, the transpose of peft's `lora_B`.
    pub b: Param<Tensor<2>>,
    /// `[out]`, with DoRA.
    pub magnitude: Option<Param<Tensor<1>>>,
    scale: f64,
}

impl Reparameterization for LowRank {
    const NAME: &'static str = "lora";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let added = self.a.val().matmul(self.b.val()) * self.scale;
        let sum = base.clone() + added.reshape(base.dims());
        match &self.magnitude {
            Some(magnitude) => {
                let norm = sum.clone().detach().square().sum_dim(0).sqrt();
                sum * (magnitude.val().unsqueeze::<D>() / norm)
            }
            None => sum,
        }
    }
}

impl LoraConfig {
    /// The adapters of a plain Burn module. `target_modules` are names of the model that transformers has in memory; versions
    /// of transformers differ in some families, and names of any version are right, those of the newest with
    /// [`ALL_LINEAR`](super::ALL_LINEAR).
    ///
    /// # Errors
    /// As [`plan`](Self::plan); of a layer that is no linear one, what it is.
    pub fn module_plan<M: HfModule>(&self, module: &M) -> Result<LoraPlan, LoraError> {
        let versions = linear_names(module);
        let mut plans = versions.iter().map(|names| self.plan(names));
        let first = plans.next().expect("every weight has a name");
        match first {
            Err(error @ LoraError::Target { .. }) => plans.find_map(Result::ok).ok_or_else(|| explained(module, error)),
            first => first,
        }
    }
}

/// The error that says what a target is, if it is a layer of `module` that cannot have an adapter.
pub fn explained<M: HfModule>(module: &M, error: LoraError) -> LoraError {
    let LoraError::Target { target, .. } = &error else { return error };
    let end = format!("*.{target}");
    let (layers, copies) = (Linears::of(module).others.into_iter(), M::NAMES.copies.iter());
    let tied = "its weight is the embedding's (tied), which an adapter would change too";
    let others = layers.chain(copies.map(|(copy, _)| (copy.to_string(), tied)));
    let found = others.flat_map(|(name, why)| M::names_in_memory(&name).into_iter().map(move |name| (name, why)));
    let named = |(name, why): (String, &'static str)| {
        let module = name.strip_suffix(".weight")?;
        (fits(target, module) || fits(&end, module)).then(|| LoraError::Unsupported { module: module.into(), why })
    };
    found.into_iter().find_map(named).unwrap_or(error)
}

/// The weights of a module's linear layers, `[out, in]`, under our paths, with their names in the memory of each version of
/// transformers, the newest first.
pub fn linear_names<M: HfModule>(module: &M) -> Vec<NameMap> {
    let linears = Linears::of(module);
    let all = linears.found.iter().map(|(ours, theirs, shape)| (ours, M::names_in_memory(theirs), shape));
    let all: Vec<_> = all.collect();
    let versions = all.iter().map(|(_, names, _)| names.len()).max().unwrap_or(1);
    let of_version = |version: usize| {
        let mut map = NameMap::default();
        for (ours, names, shape) in &all {
            map.same(format!("{ours}.weight"), names[version.min(names.len() - 1)].clone(), *shape);
        }
        map
    };
    (0..versions).map(of_version).collect()
}

struct Linears {
    names: ModuleNames,
    /// Names of fields, and the types that have them.
    fields: Vec<(String, String)>,
    /// Our path of a layer, the name of its weight in files, and its shape `[out, in]`.
    found: Vec<(String, String, [usize; 2])>,
    /// The names of other layers' weights in files, and why these cannot have adapters.
    others: Vec<(String, &'static str)>,
}

impl Linears {
    fn of<M: HfModule>(module: &M) -> Self {
        let mut linears = Self { names: M::NAMES, fields: Vec::new(), found: Vec::new(), others: Vec::new() };
        module.visit(&mut linears);
        linears
    }
}

impl ModuleVisitor for Linears {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.fields.push((name.into(), container.into()));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.fields.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some((leaf, container)) = self.fields.last() else { return };
        let layer = container.rsplit(':').next().unwrap_or_default();
        let (path, is_linear) = (joined(&self.fields), leaf == "weight" && layer == "Linear");
        let why = match layer {
            "Embedding" => "it is an embedding, and adapters are of linear layers",
            _ if layer.starts_with("Conv") => "it is a convolution, and adapters are of linear layers",
            _ => "it is no linear layer",
        };
        let Some(foreign) = self.names.foreign(&path, layer) else { return };
        let Some(ours) = path.strip_suffix(".weight").filter(|_| is_linear) else {
            return self.others.push((foreign.name, why));
        };
        let shape = param.lazy_shape();
        self.found.push((ours.into(), foreign.name, [shape[1], shape[0]]));
    }
}

fn joined(fields: &[(String, String)]) -> String {
    fields.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(".")
}

/// `module` with the adapters of `plan`, which are trained; everything else is frozen. Their values are those of `values`,
/// under our names; without them, those that peft starts with, from the generator of the module's device: the module then
/// computes what it did.
///
/// # Errors
/// If a layer has an adapter already, or the module has no layer of a name in the plan, as one that has the planned module in
/// a field.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use models::lora::{LoraConfig, with_adapters};
/// use models::{Bert, BertConfig};
///
/// let device = Device::flex().autodiff();
/// let sizes = BertConfig { vocab_size: 40, hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 2, ..BertConfig::base() };
/// let model = Bert::new(&sizes, &device);
/// let config = LoraConfig { target_modules: vec!["query".into(), "value".into()], ..LoraConfig::default() };
/// let plan = config.module_plan(&model)?;
/// let model = with_adapters(model, &plan, None)?;
/// assert_eq!((plan.len(), model.layers[0].attention.query.weight.is_require_grad()), (4, false));
/// # Ok::<(), models::lora::LoraError>(())
/// ```
pub fn with_adapters<M: Module>(module: M, plan: &LoraPlan, values: Option<&HostTensors>) -> Result<M, LoraError> {
    let (mut attached, mut twice) = (BTreeSet::new(), None);
    let module = module.apply_reparameterization(Attach { plan, values, attached: &mut attached, twice: &mut twice });
    if let Some(module) = twice {
        return Err(LoraError::Unsupported { module, why: "it has an adapter already" });
    }
    match plan.targets().find(|(ours, ..)| !attached.contains(*ours)) {
        Some((ours, ..)) => Err(LoraError::Unclaimed(ours.into())),
        None => Ok(module),
    }
}

struct Attach<'a> {
    plan: &'a LoraPlan,
    values: Option<&'a HostTensors>,
    attached: &'a mut BTreeSet<String>,
    /// The first layer that had one.
    twice: &'a mut Option<String>,
}

impl Attach<'_> {
    fn low_rank<const D: usize>(&self, layer: &str, base: Tensor<D>) -> LowRank {
        let (device, dtype) = (base.device(), base.dtype());
        let LayerAdapter { rank, scale, dora, .. } = self.plan.of_layer(layer).expect("the layer has an adapter");
        let [input, out] = [base.dims()[0], base.dims()[1]];
        let stored = |part: &str| self.values.map(|values| &values[&format!("{layer}.{part}")].data);
        let tensor = |values: Vec<f64>, shape| Tensor::<2>::from_data(TensorData::new(values, shape), (&device, dtype));
        let matrix = |part: &str, [rows, columns]: [usize; 2], start: &dyn Fn(&Device) -> Tensor<2>| match stored(part)
        {
            // Stored as its transpose.
            Some(data) => tensor(data.clone(), [columns, rows]).transpose(),
            None => start(&device).cast(dtype),
        };
        let bound = 1.0 / (input as f64).sqrt();
        let uniform = |device: &Device| Tensor::random([input, rank], Distribution::Uniform(-bound, bound), device);
        let zeros = |device: &Device| Tensor::zeros([rank, out], device);
        let magnitude = || match stored("lora_magnitude_vector.weight") {
            Some(data) => tensor(data.clone(), [1, out]).reshape([out]),
            None => base.clone().detach().square().sum_dim(0).sqrt().reshape([out]),
        };
        let param = |value: Tensor<2>| Param::from_tensor(value.detach());
        LowRank {
            a: param(matrix("lora_A.weight", [input, rank], &uniform)),
            b: param(matrix("lora_B.weight", [rank, out], &zeros)),
            magnitude: dora.then(|| Param::from_tensor(magnitude().detach())),
            scale,
        }
    }
}

impl Reparameterizer for Attach<'_> {
    type Reparam = LowRank;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LowRank>) {
        if let Some((layer, _)) = path.split_once(&format!(".weight.{}.", LowRank::NAME)) {
            self.twice.get_or_insert_with(|| layer.into());
        }
        let param = param.set_require_grad(false);
        let Some(layer) = path.strip_suffix(".weight").filter(|layer| self.plan.has(layer)) else {
            return (param, None);
        };
        self.attached.insert(layer.into());
        let low_rank = self.low_rank(layer, param.base());
        (param, Some(low_rank))
    }
}

/// The adapters of `module`, which [`with_adapters`] gave it for this plan.
///
/// # Errors
/// Names a layer of the plan that has no adapter.
pub fn module_adapter<M: Module>(module: &M, plan: LoraPlan) -> Result<Adapter, LoraError> {
    Ok(Adapter { tensors: tensors(module, &plan, None)?, plan: Arc::new(plan) })
}

/// The gradients of the adapters of `module` under our names; zeros of one that has none.
///
/// # Errors
/// As [`module_adapter`].
pub fn adapter_gradients<M: Module>(
    module: &M,
    plan: &LoraPlan,
    gradients: &Gradients,
) -> Result<HostTensors, LoraError> {
    tensors(module, plan, Some(gradients))
}

fn tensors<M: Module>(module: &M, plan: &LoraPlan, gradients: Option<&Gradients>) -> Result<HostTensors, LoraError> {
    let mut read = Read { gradients, fields: Vec::new(), found: BTreeMap::new() };
    module.visit(&mut read);
    let has = |ours: &str| read.found.contains_key(&format!("{ours}.lora_A.weight"));
    match plan.targets().find(|(ours, ..)| !has(ours)) {
        Some((ours, ..)) => Err(LoraError::Unclaimed(ours.into())),
        None => Ok(read.found),
    }
}

struct Read<'a> {
    gradients: Option<&'a Gradients>,
    fields: Vec<(String, String)>,
    found: HostTensors,
}

impl ModuleVisitor for Read<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.fields.push((name.into(), container.into()));
    }

    fn exit_module(&mut self, _: &str, _: &str) {
        self.fields.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = joined(&self.fields);
        let Some((layer, part)) = path.split_once(&format!(".weight.{}.", LowRank::NAME)) else { return };
        let part = PARTS[["a", "b"].iter().position(|known| *known == part).unwrap_or(2)].0;
        let value = param.val();
        let tensor = match self.gradients {
            Some(gradients) => value.grad(gradients).unwrap_or_else(|| value.clone().without_autodiff().zeros_like()),
            None => value,
        };
        let tensor = if D == 2 { tensor.transpose() } else { tensor };
        let (shape, data) = (tensor.dims().to_vec(), tensor.into_data().iter::<f64>().collect());
        self.found.insert(format!("{layer}.{part}"), HostTensor { shape, data });
    }
}
