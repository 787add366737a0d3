//! Ctrl-C: the first asks the training to stop after the current step, the second ends the process.

use std::sync::{Mutex, Once};

use burn::train::Interrupter;

/// The training that Ctrl-C stops; a process has one signal handler and trains one model at a time.
static CURRENT: Mutex<Option<Interrupter>> = Mutex::new(None);

/// Exit code of a process that ended on SIGINT, as shells report it.
const EXIT_CODE_INTERRUPTED: i32 = 130;

/// Lets Ctrl-C stop `interrupter` until the returned guard is dropped.
///
/// burn-train's dashboard reads Ctrl-C as a key, so there `q` stops; this is for runs without it. A program that has
/// installed a handler of its own keeps it.
pub(super) fn on_ctrl_c(interrupter: &Interrupter) -> CtrlC {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        if let Err(error) = ctrlc::set_handler(handle) {
            eprintln!("Ctrl-C is not handled: {error}");
        }
    });
    set(Some(interrupter.clone()));
    CtrlC
}

/// Ctrl-C is bound to a training while this lives.
pub(super) struct CtrlC;

impl Drop for CtrlC {
    fn drop(&mut self) {
        set(None);
    }
}

fn set(interrupter: Option<Interrupter>) {
    *CURRENT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = interrupter;
}

fn handle() {
    let current = CURRENT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    match current {
        Some(interrupter) if !interrupter.should_stop() => {
            eprintln!("stopping after this step; press Ctrl-C again to end at once");
            interrupter.stop(Some("Ctrl-C"));
        }
        _ => std::process::exit(EXIT_CODE_INTERRUPTED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_stops_the_training_that_is_bound() {
        let interrupter = Interrupter::new();
        set(Some(interrupter.clone()));
        handle();
        set(None);
        assert_eq!(interrupter.interruption().unwrap().reason.as_deref(), Some("Ctrl-C"));
    }
}
