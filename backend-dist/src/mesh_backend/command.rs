//! How a caller speaks to the device of a tensor.
//!
//! A device group has no operation of ours, but it passes on what it gets at once and on the calling thread. So a
//! command waits in a thread-local until the next operation, its carrier, brings the tensor it is about.

use crate::logical::Placement;
use std::cell::RefCell;

/// What the device shall do with the input of the carrier instead of running it.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// The output is the input; its placements are the answer.
    Where,
}

thread_local! {
    static WAITING: RefCell<Option<Command>> = const { RefCell::new(None) };
    static ANSWER: RefCell<Option<Vec<Placement>>> = const { RefCell::new(None) };
}

/// The command that waits for this operation, if one does.
pub(super) fn take() -> Option<Command> {
    WAITING.take()
}

/// Tells the caller where the carrier's input is now.
pub(super) fn answer(placements: Vec<Placement>) {
    ANSWER.set(Some(placements));
}

/// Runs `carrier`, which must issue exactly one operation first, under `command`. Returns its value and where its input
/// was afterwards.
///
/// # Panics
/// If `carrier` does not reach a logical device.
pub(super) fn send<T>(command: Command, carrier: impl FnOnce() -> T) -> (T, Vec<Placement>) {
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
