//! Ctrl-C, and SIGTERM, which schedulers send before they end a job (Megatron-LM's `--exit-signal-handler`): the first
//! asks the training to stop after the current step, the second ends the process.

use std::sync::{Mutex, Once};

use burn::train::Interrupter;

/// The training that Ctrl-C stops; a process has one signal handler and trains one model at a time.
static CURRENT: Mutex<Option<Interrupter>> = Mutex::new(None);

/// Exit codes of processes that ended on SIGINT and on SIGTERM, as shells report them.
const INTERRUPTED: i32 = 130;
const TERMINATED: i32 = 143;

/// Lets Ctrl-C and SIGTERM stop `interrupter` until the returned guard is dropped.
///
/// burn-train's dashboard reads Ctrl-C as a key, so there `q` stops; this is for runs without it. A program that has
/// installed a handler of its own keeps it.
pub(super) fn on_ctrl_c(interrupter: &Interrupter) -> CtrlC {
    static HANDLER: Once = Once::new();
    HANDLER.call_once(|| {
        if let Err(error) = ctrlc::set_handler(|| handle("Ctrl-C", INTERRUPTED)) {
            eprintln!("Ctrl-C is not handled: {error}");
        }
        #[cfg(unix)]
        sigterm::on(|| handle("SIGTERM", TERMINATED));
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

fn handle(signal: &str, exit_code: i32) {
    let current = CURRENT.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    match current {
        Some(interrupter) if !interrupter.should_stop() => {
            eprintln!("stopping after this step; {signal} again ends at once");
            interrupter.stop(Some(signal));
        }
        _ => std::process::exit(exit_code),
    }
}

#[cfg(unix)]
mod sigterm {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    const NUMBER: i32 = 15;
    /// What `signal` returns where nothing but the default was done so far.
    const DEFAULT: usize = 0;

    unsafe extern "C" {
        fn signal(number: i32, handler: usize) -> usize;
    }

    static CAME: AtomicBool = AtomicBool::new(false);

    extern "C" fn note(_: i32) {
        CAME.store(true, Ordering::SeqCst);
    }

    /// Calls `then` on a thread of its own soon after each SIGTERM. A program that handles or ignores the signal goes
    /// on doing so.
    pub fn on(then: impl Fn() + Send + 'static) {
        let look = move || {
            loop {
                std::thread::sleep(Duration::from_millis(20));
                if CAME.swap(false, Ordering::SeqCst) {
                    then();
                }
            }
        };
        // Without the thread the signal must end the process.
        if std::thread::Builder::new().name("SIGTERM".into()).spawn(look).is_err() {
            return;
        }
        // SAFETY: the handler does nothing but store to an atomic, which a signal handler may.
        unsafe {
            let before = signal(NUMBER, note as extern "C" fn(i32) as usize);
            if before != DEFAULT {
                signal(NUMBER, before);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_stops_the_training_that_is_bound() {
        let interrupter = Interrupter::new();
        set(Some(interrupter.clone()));
        handle("Ctrl-C", INTERRUPTED);
        set(None);
        assert_eq!(interrupter.interruption().unwrap().reason.as_deref(), Some("Ctrl-C"));
    }
}
