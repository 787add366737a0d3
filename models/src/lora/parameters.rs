//! Adapters of experts that are one tensor, as peft has them in files (`target_parameters`).
//!
//! One module has the A of all experts, `[experts · rank, in]`, and their B as `[out, rank · experts]`, in which the experts
//! are neighbours. A parameter has no module of its own: peft wraps the one that has it, once for each parameter with an
//! adapter, in the order in which the module has them. So the last one's tensors have the module's name, and those before it
//! are behind as many `base_layer`.

use backend_dist::shard::HostTensor;

use super::LoraPlan;
use crate::names::{HostTensors, NameError};

/// The parameters of a module of experts that are one tensor each, in the order in which transformers' modules have them.
pub const EXPERT_PARAMETERS: [&str; 2] = ["gate_up_proj", "down_proj"];

/// The module of a parameter, and the parameter's place in it, if both are known.
pub(super) fn place_of(parameter: &str) -> Option<(&str, usize)> {
    let (module, name) = parameter.rsplit_once('.')?;
    Some((module, EXPERT_PARAMETERS.iter().position(|known| *known == name)?))
}

/// A parameter with an adapter: its tensors' names here and in files, without endings, and its number of experts.
struct Parameter {
    here: String,
    in_files: String,
    experts: usize,
}

impl LoraPlan {
    /// The adapters' tensors by our names, from those of a file whose names begin with `prefix`.
    ///
    /// # Errors
    /// If one is missing, has a wrong shape, or is unknown.
    pub fn import(&self, prefix: &str, theirs: HostTensors) -> Result<HostTensors, NameError> {
        let (names, mut theirs) = (self.names(prefix), theirs);
        for Parameter { here, in_files, experts } in self.in_files(prefix) {
            let mut take = |part: &str| {
                let name = format!("{in_files}.lora_{part}.weight");
                theirs.remove(&name).map(|tensor| (name.clone(), tensor)).ok_or(NameError::Missing { name })
            };
            let ((_, a), (file_name, HostTensor { shape: found, data })) = (take("A")?, take("B")?);
            theirs.insert(format!("{here}.lora_A.weight"), a);
            let name = format!("{here}.lora_B.weight");
            let stack =
                names.iter().find(|(_, foreign)| foreign.name == name).map(|(_, foreign)| foreign.shape.clone());
            let stack = stack.expect("a parameter with an adapter has a B");
            let (rank, out) = (stack[1], stack[2]);
            let expected = vec![out, rank * experts];
            if found != expected {
                return Err(NameError::Shape { name: file_name, found, expected });
            }
            let of = |at: usize| data[at % out * rank * experts + at / out % rank * experts + at / out / rank];
            theirs.insert(name, HostTensor { data: (0..data.len()).map(of).collect(), shape: stack });
        }
        names.import(&theirs)
    }

    /// The tensors of a file whose names begin with `prefix`, from the adapters' tensors by our names.
    ///
    /// # Errors
    /// As [`LoraPlan::import`].
    pub fn export(&self, prefix: &str, ours: &HostTensors) -> Result<HostTensors, NameError> {
        let mut theirs = self.names(prefix).export(ours)?;
        for Parameter { here, in_files, experts } in self.in_files(prefix) {
            let mut take = |part: &str| theirs.remove(&format!("{here}.{part}")).expect("a parameter has A and B");
            let (a, b) = (take("lora_A.weight"), take("lora_B.weight"));
            let (rank, out) = (b.shape[1], b.shape[2]);
            let of = |at: usize| b.data[(at % experts * rank + at / experts % rank) * out + at / experts / rank];
            let b = HostTensor { data: (0..b.data.len()).map(of).collect(), shape: vec![out, rank * experts] };
            theirs.extend([(format!("{in_files}.lora_A.weight"), a), (format!("{in_files}.lora_B.weight"), b)]);
        }
        Ok(theirs)
    }

    fn in_files(&self, prefix: &str) -> Vec<Parameter> {
        let all = self.parameters();
        let places = all.keys().map(|name| place_of(name).expect("a plan has no other parameters"));
        let places: Vec<(&str, usize)> = places.collect();
        let one = |((name, experts), (module, own)): ((&&str, &usize), &(&str, usize))| {
            let later = places.iter().filter(|(of, place)| of == module && place > own).count();
            let in_files = format!("{prefix}{module}{}", ".base_layer".repeat(later));
            Parameter { here: format!("{prefix}{name}"), in_files, experts: *experts }
        };
        all.iter().zip(&places).map(one).collect()
    }
}
