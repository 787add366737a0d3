//! Plans of operations that have come before: each step of a training has the operations of the last one, with other
//! tensors and numbers.

use super::{Interpreter, inputs::Local};
use crate::logical::Placement::Partial;
use crate::logical::{OpPlan, TensorState, plan};
use crate::mesh_backend::ids::{ById, IdHasher};
use crate::mesh_backend::inner::Inner;
use burn_ir::{IrVisitorMut, OperationIr, ScalarIr, TensorId, TensorIr, TensorStatus};
use std::hash::{Hash, Hasher};
use std::slice::Iter;
use std::sync::Arc;

/// Most plans that are kept: a program whose operations differ in each step makes ever more.
const MOST: usize = 1 << 14;

/// What was taken from an operation so that it equals others like it: its tensors, each once, inputs first, and numbers.
#[derive(Default)]
pub(super) struct Names {
    pub tensors: Vec<TensorId>,
    /// How many of them are inputs.
    inputs: usize,
    scalars: Vec<ScalarIr>,
}

impl Names {
    /// Calls the tensors of `op` by their places here.
    pub fn take(op: &mut OperationIr) -> Self {
        let mut names = Self { tensors: Vec::with_capacity(4), ..Self::default() };
        op.visit_mut(&mut names);
        names
    }

    /// Gives them to an operation like that; its inputs are `locals`, or as they were if there are none.
    pub fn give(&self, op: &mut OperationIr, locals: &[Local]) {
        op.visit_mut(&mut Given { tensors: &self.tensors, locals, scalars: self.scalars.iter() });
    }

    /// What the tensor in this place is.
    pub fn of(&self, place: TensorId) -> TensorId {
        self.tensors[place.value() as usize]
    }
}

impl IrVisitorMut for Names {
    fn visit_tensor_mut(&mut self, x: &mut TensorIr) {
        let known = self.tensors.iter().position(|id| *id == x.id);
        let place = known.unwrap_or_else(|| {
            self.tensors.push(x.id);
            self.inputs += usize::from(x.status != TensorStatus::NotInit);
            self.tensors.len() - 1
        });
        x.id = TensorId::new(place as u64);
    }

    fn visit_scalar_mut(&mut self, x: &mut ScalarIr) {
        self.scalars.push(std::mem::replace(x, ScalarIr::Bool(false)));
    }
}

struct Given<'a> {
    tensors: &'a [TensorId],
    locals: &'a [Local],
    scalars: Iter<'a, ScalarIr>,
}

impl IrVisitorMut for Given<'_> {
    fn visit_tensor_mut(&mut self, x: &mut TensorIr) {
        let place = x.id.value() as usize;
        x.id = self.tensors[place];
        if let Some(local) = self.locals.get(place) {
            x.id = local.id;
            if local.is_temporary {
                x.status = TensorStatus::ReadOnly;
            }
        }
    }

    fn visit_scalar_mut(&mut self, x: &mut ScalarIr) {
        *x = *self.scalars.next().expect("operations alike have as many numbers");
    }
}

/// What the ranks do for an operation and for those like it.
pub(super) struct Known {
    op: OperationIr,
    /// Where the inputs are, and whether sums are stored in half precision.
    states: Vec<(TensorState, bool)>,
    /// Its tensors are places.
    pub plan: OpPlan,
    /// Each input once, consumed if it is anywhere.
    pub inputs: Vec<TensorIr>,
    /// What is reported if an input is gathered for want of a rule, and its bytes.
    pub fallback: Option<(String, usize)>,
}

/// Plans by the hash of what they follow from.
#[derive(Default)]
pub(super) struct Plans {
    known: ById<Vec<Arc<Known>>>,
    count: usize,
}

impl<B: Inner> Interpreter<B> {
    /// What to do for `op`, from which `names` were taken.
    pub(super) fn known(&mut self, op: &OperationIr, names: &Names) -> Arc<Known> {
        let Self { table, executor, axes, homes, plans, .. } = self;
        let state = |id: TensorId| &table.get(id).state;
        // Rules ask for it of sums alone.
        let is_half = |id| state(id).at.contains(&Partial) && executor.is_half(table.get(id).local);
        let inputs = &names.tensors[..names.inputs];
        let mut hasher = IdHasher::default();
        op.hash(&mut hasher);
        inputs.iter().for_each(|&id| state(id).at.hash(&mut hasher));
        let hash = TensorId::new(hasher.finish());
        let is_like = |known: &&Arc<Known>| {
            let here = inputs.iter().map(|&id| (state(id), is_half(id)));
            known.op == *op && known.states.iter().map(|(state, is_half)| (state, *is_half)).eq(here)
        };
        if let Some(known) = plans.known.get(&hash).and_then(|known| known.iter().find(is_like)) {
            return known.clone();
        }
        let (state_at, half_at) = (|place| state(names.of(place)), |place| is_half(names.of(place)));
        let plan = plan(op, state_at, half_at, axes, homes);
        let fallback = plan.fell_back.then(|| fallback(op, state_at));
        let states = inputs.iter().map(|&id| (state(id).clone(), is_half(id))).collect();
        let is_new = homes.note(op, state_at, &plan);
        let known = Arc::new(Known { inputs: once_each(op), op: op.clone(), states, plan, fallback });
        if is_new || plans.count == MOST {
            // Plans, this one too, follow from where activations are kept.
            *plans = Plans::default();
        } else {
            plans.count += 1;
            plans.known.entry(hash).or_default().push(known.clone());
        }
        known
    }
}

fn once_each(op: &OperationIr) -> Vec<TensorIr> {
    let mut once: Vec<TensorIr> = Vec::new();
    for x in op.inputs() {
        match once.iter_mut().find(|other| other.id == x.id) {
            Some(other) if x.status == TensorStatus::ReadWrite => other.status = x.status,
            Some(_) => {}
            None => once.push(x.clone()),
        }
    }
    once
}

/// Name and shapes of `op`, and the bytes of its sharded inputs.
fn fallback<'s>(op: &OperationIr, state: impl Fn(TensorId) -> &'s TensorState) -> (String, usize) {
    let sharded = |x: &&TensorIr| state(x.id).at.iter().any(|at| at.is_shard());
    let bytes = op.inputs().filter(sharded).map(|x| x.shape.num_elements() * x.dtype.size()).sum();
    let shapes = |x: &TensorIr| format!("{:?}", x.shape.to_vec());
    let inputs: Vec<_> = op.inputs().map(shapes).collect();
    let outputs: Vec<_> = op.outputs().map(shapes).collect();
    (format!("{} {} -> {}", name(op), inputs.join(" "), outputs.join(" ")), bytes)
}

/// The operation's name: `Reshape`, `Matmul`, `Conv2dWeightBackward`, …
pub(super) fn name(op: &OperationIr) -> String {
    let text = format!("{op:?}");
    let end = text.find("OpIr").or_else(|| text.find(" {")).unwrap_or(text.len());
    let start = text[..end].rfind(['(', ' ']).map_or(0, |at| at + 1);
    let before = &text[..start.saturating_sub(1)];
    // `BaseFloat(Reshape(ShapeOpIr { .. }))`: the word before the structure's name.
    before.rsplit(['(', ' ']).next().unwrap_or(&text[..end]).to_string()
}
