//! Values of a chain that are not written: a few steps compute them again from what is, where they are read. A norm is
//! such a one: its centered and its normalized input follow from the input and two numbers of each row, and backward
//! passes, which read all three, read one.

use super::facts::extent;
use super::{Chain, Value};
use burn_ir::TensorId;
use kernels_cubecl::fused::{Extent, Register, Step};

/// Most steps from what is stored to a value.
const MOST: usize = 12;

/// What a remade value is computed from.
#[derive(Clone)]
pub enum Origin<H> {
    /// An output of the chain's launch.
    Output(usize),
    /// An input of the chain.
    Input(H),
}

/// Which values a launch writes, and which are remade from them.
#[derive(Default)]
pub(super) struct Split {
    /// Registers of all elements that are written in full precision.
    pub stored: Vec<Register>,
    /// Registers of one number for each row, which are written for those that are remade.
    pub rows: Vec<Register>,
    /// The steps of each remade value, from what is stored.
    pub remade: Vec<(TensorId, Vec<Register>)>,
}

impl Split {
    pub fn is_remade(&self, id: TensorId) -> bool {
        self.remade.iter().any(|(other, _)| *other == id)
    }
}

impl<H: Clone> Chain<H> {
    /// Decides which of the chain's values need not be written. A value that is about to be read is.
    pub(super) fn split(&self, values: &[(&TensorId, &Value)], keeps_half: bool, wanted: Option<TensorId>) -> Split {
        let mut split = Split::default();
        let mut whole: Vec<_> = values.iter().filter(|(_, value)| self.is_stored_whole(value, keeps_half)).collect();
        whole.sort_by_key(|(_, value)| value.register);
        for (id, value) in whole {
            let mut path = Vec::new();
            let may_be_remade = Some(**id) != wanted
                && !split.stored.contains(&value.register)
                && self.trace(value.register, &split.stored, &mut path)
                && path.len() <= MOST
                && path.iter().any(|register| self.is_row(*register) || split.stored.contains(register));
            if may_be_remade {
                split.rows.extend(path.iter().copied().filter(|register| self.is_row(*register)));
                split.remade.push((**id, path));
            } else {
                split.stored.push(value.register);
            }
        }
        split.rows.sort_unstable();
        split.rows.dedup();
        split
    }

    pub(super) fn is_whole(&self, value: &Value) -> bool {
        self.size.is_some_and(|size| extent(&value.shape, size) == Some(Extent::Whole))
    }

    /// Whether a value has all elements, in full precision.
    fn is_stored_whole(&self, value: &Value, keeps_half: bool) -> bool {
        self.is_whole(value) && !(keeps_half && self.may_be_half(value))
    }

    /// Whether a value comes from half precision alone. Numbers of rows are f32, also in a chain that has nothing else: which
    /// chain they are part of depends on what a rank has read, and collectives need them alike on all.
    pub(super) fn may_be_half(&self, value: &Value) -> bool {
        let has_columns = self.size.is_some_and(|(_, columns)| columns > 1);
        has_columns && self.is_whole(value) && self.facts[value.register].is_half
    }

    /// Whether a register is a number of each row that the chain computes.
    pub(super) fn is_row(&self, register: Register) -> bool {
        self.facts[register].extent == Some(Extent::PerRow) && !matches!(self.steps[register], Step::Load(_))
    }

    /// Appends the registers that compute `register` from stored ones, numbers of rows and narrow inputs, in order. Fails if
    /// it needs others.
    fn trace(&self, register: Register, stored: &[Register], path: &mut Vec<Register>) -> bool {
        if path.contains(&register) {
            return true;
        }
        let is_found = stored.contains(&register)
            || self.is_row(register)
            || match self.steps[register] {
                Step::Load(input) => self.inputs[input].0.extent != Extent::Whole,
                Step::Scalar(_) => true,
                Step::Unary(_, x) => self.trace(x, stored, path),
                Step::Binary(_, a, b) => self.trace(a, stored, path) && self.trace(b, stored, path),
                Step::Reduce(..) | Step::Bernoulli(_) => false,
            };
        if is_found {
            path.push(register);
        }
        is_found
    }
}
