//! How a caller speaks to the device of a tensor.
//!
//! A device group has no operation of ours, but it passes on what it gets at once and on the calling thread. So a
//! command waits in a thread-local until the next operation, its carrier, brings the tensor it is about.

use super::formula::AdamWStep;
use crate::logical::Placement;
use burn_ir::TensorId;
use serde::{Deserialize, Serialize};
use std::cell::{Cell, RefCell};

/// What the device shall do with the inputs of the carrier instead of running it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum Command {
    /// The output is the input, moved to `to` along the mesh's axis `axis`.
    Move {
        /// Index of the axis on the device.
        axis: usize,
        /// Where to.
        to: Placement,
        /// Whether it is a parameter.
        weight: bool,
    },
    /// Nothing but to say what the device calls the input. There is no output, which the caller drops.
    Name,
    /// The outputs are weight and moments after a step. The inputs are those before it, and the gradient three times.
    Step(AdamWStep),
    /// The output is this tensor, which nobody else has. The carrier has no input.
    Adopt(TensorId),
}

thread_local! {
    static WAITING: RefCell<Option<Command>> = const { RefCell::new(None) };
    static NAME: Cell<Option<TensorId>> = const { Cell::new(None) };
}

/// The command that waits for this operation, if one does.
pub(super) fn take() -> Option<Command> {
    WAITING.take()
}

/// Tells the caller what the device calls the carrier's first tensor.
pub(super) fn answer(name: TensorId) {
    NAME.set(Some(name));
}

/// Runs `carrier`, which must issue exactly one operation first, under `command`. Returns its value, and what the device
/// calls its first tensor. The device does not wait for its interpreter.
///
/// # Panics
/// If `carrier` does not reach a logical device.
pub(super) fn send<T>(command: Command, carrier: impl FnOnce() -> T) -> (T, TensorId) {
    WAITING.set(Some(command.clone()));
    NAME.take();
    let out = carrier();
    let unheard = WAITING.take();
    match (unheard, NAME.take()) {
        (None, Some(name)) => (out, name),
        _ => panic!("{command:?} reached no logical device: its tensor is on another"),
    }
}
