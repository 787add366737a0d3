//! Gradients of weights that a backward pass puts off a little, until it would wait for an exchange.
//!
//! Nobody in the pass needs them, and an exchange that stands between two products has nothing else to run beside it.

use std::cell::{Cell, RefCell};

use burn::backend::autodiff::NodeId;

/// A weight and what is still to be done for its gradient.
type Job = (NodeId, Box<dyn FnOnce()>);

thread_local! {
    /// At most one: what is put off next has the one before done first.
    static OWED: RefCell<Option<Job>> = const { RefCell::new(None) };
    /// Whether somebody will ask for what is owed at the end.
    static IS_OPEN: Cell<bool> = const { Cell::new(false) };
}

/// Runs `pass`, in which work may be put off, and then what is still owed.
pub(super) fn within<T>(pass: impl FnOnce() -> T) -> T {
    let before = IS_OPEN.replace(true);
    let result = pass();
    pay();
    IS_OPEN.set(before);
    result
}

/// Puts `job` off, of the gradient of the weight `id`, until [`pay`], or does it now if nobody will ask for it.
#[cfg(feature = "cuda")]
pub(super) fn owe(id: NodeId, job: impl FnOnce() + 'static) {
    pay();
    match IS_OPEN.get() {
        true => OWED.set(Some((id, Box::new(job)))),
        false => job(),
    }
}

/// Does what is owed.
pub(super) fn pay() {
    if let Some((_, job)) = OWED.take() {
        job();
    }
}

/// Does what is owed to this weight: another gradient is about to be added to it.
pub(super) fn pay_to(id: NodeId) {
    if OWED.with_borrow(|owed| owed.as_ref().is_some_and(|(owed, _)| *owed == id)) {
        pay();
    }
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn work_is_done_in_order_and_before_the_pass_ends() {
        let done = Rc::new(RefCell::new(Vec::new()));
        let job = |number: usize| {
            let done = done.clone();
            move || done.borrow_mut().push(number)
        };
        let [a, b] = [NodeId::new(), NodeId::new()];
        owe(a, job(0));
        assert_eq!(*done.borrow(), [0], "outside of a pass nothing is put off");
        within(|| {
            owe(a, job(1));
            pay_to(b);
            assert_eq!(*done.borrow(), [0]);
            owe(b, job(2));
            assert_eq!(*done.borrow(), [0, 1]);
            pay_to(b);
            assert_eq!(*done.borrow(), [0, 1, 2]);
            owe(a, job(3));
        });
        assert_eq!(*done.borrow(), [0, 1, 2, 3]);
    }
}
