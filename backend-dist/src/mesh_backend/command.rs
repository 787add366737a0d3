//! How a caller speaks to the device of a tensor.
//!
//! A device group has no operation of ours, but it passes on what it gets at once and on the calling thread. So a
//! command waits in a thread-local until the next operation, its carrier, brings the tensor it is about.

use crate::logical::{Placement, TensorState};
use burn_ir::TensorId;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;

/// What the device shall do with the input of the carrier instead of running it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    /// The output is the input; what the device knows of it is the answer.
    Where,
    /// The output is this tensor, which nobody else has. The carrier has no input.
    Adopt(TensorId),
}

/// What the device knows of the carrier's input.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    pub id: TensorId,
    pub state: TensorState,
}

thread_local! {
    static WAITING: RefCell<Option<Command>> = const { RefCell::new(None) };
    static ANSWER: RefCell<Option<Answer>> = const { RefCell::new(None) };
}

/// The command that waits for this operation, if one does.
pub(super) fn take() -> Option<Command> {
    WAITING.take()
}

/// Tells the caller what the device knows of the carrier's input.
pub(super) fn answer(answer: Answer) {
    ANSWER.set(Some(answer));
}

/// Runs `carrier`, which must issue exactly one operation first, under `command`. Returns its value and what
/// the device said of its input.
///
/// # Panics
/// If `carrier` does not reach a logical device.
pub(super) fn send<T>(command: Command, carrier: impl FnOnce() -> T) -> (T, Answer) {
    WAITING.set(Some(command.clone()));
    ANSWER.take();
    let out = carrier();
    let unheard = WAITING.take();
    let answer = ANSWER.take();
    match (unheard, answer) {
        (None, Some(answer)) => (out, answer),
        _ => panic!("{command:?} reached no logical device: its tensor is on another"),
    }
}
