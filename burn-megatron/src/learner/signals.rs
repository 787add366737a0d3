//! Signals that ask a run to end: Ctrl-C, SIGTERM, which schedulers send before they end a job (Megatron-LM's
//! `--exit-signal-handler`), and SIGHUP, which comes when a terminal closes. The first asks the training to stop after
//! the current step, where it saves; the second ends the process.

use std::ffi::c_int;
use std::io::{self, Write};
use std::sync::{Arc, Once};
use std::thread;

use burn::train::Interrupter;
use parking_lot::Mutex;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;

/// The training that signals stop; a process has one handler and trains one model at a time.
static CURRENT: Mutex<Option<Interrupter>> = Mutex::new(None);

/// The signals and what they are called.
const SIGNALS: [(c_int, &str); 3] = [(SIGINT, "Ctrl-C"), (SIGTERM, "SIGTERM"), (SIGHUP, "SIGHUP")];

/// Lets signals stop `interrupter` until the returned guard is dropped.
///
/// burn-train's dashboard reads Ctrl-C as a key, so there `q` stops; this is for runs without it. A program that
/// handles or ignores a signal (`nohup`) keeps doing so.
pub(super) fn on_signals(interrupter: &Interrupter) -> Bound {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        if let Err(error) = listen() {
            log::warn!("signals end this process at once: {error}");
        }
    });
    bind(Some(interrupter.clone()));
    Bound
}

/// Signals are bound to a training while this lives.
pub(super) struct Bound;

impl Drop for Bound {
    fn drop(&mut self) {
        bind(None);
    }
}

/// Has a write beyond the limit of a file's size (`ulimit -f`) fail with an error, where it would end the process.
pub(crate) fn limit_of_files_is_an_error() {
    if is_default(SIGXFSZ) {
        // A signal that cannot be handled does what it did before.
        let _ = flag::register(SIGXFSZ, Arc::default());
    }
}

fn bind(interrupter: Option<Interrupter>) {
    *CURRENT.lock() = interrupter;
}

/// Handles signals on a thread of its own. Without the thread they end the process.
fn listen() -> io::Result<()> {
    let watch =
        || match Signals::new(SIGNALS.map(|(number, _)| number).into_iter().filter(|&number| is_default(number))) {
            Ok(mut signals) => signals.forever().for_each(handle),
            Err(error) => log::warn!("signals end this process at once: {error}"),
        };
    thread::Builder::new().name("signals".into()).spawn(watch).map(drop)
}

fn handle(number: c_int) {
    let current = CURRENT.lock().clone();
    match current {
        Some(interrupter) if !interrupter.should_stop() => {
            let signal = SIGNALS.iter().find(|(known, _)| *known == number).map_or("a signal", |(_, name)| name);
            interrupter.stop(Some(signal));
            // A terminal that has gone takes no words, which is no reason to panic.
            let _ = writeln!(io::stderr(), "stopping after this step; {signal} again ends at once");
        }
        // As shells report a process that a signal has ended.
        _ => std::process::exit(128 + number),
    }
}

/// Whether nothing but the system's default happens at a signal.
fn is_default(number: c_int) -> bool {
    // SAFETY: without a new action `sigaction` only writes the current one to a value of its own type, which may be all
    // zeros before.
    unsafe {
        let mut current: libc::sigaction = std::mem::zeroed();
        libc::sigaction(number, std::ptr::null(), &mut current) == 0 && current.sa_sigaction == libc::SIG_DFL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_signal_stops_the_training_that_is_bound() {
        for (number, name) in SIGNALS {
            let interrupter = Interrupter::new();
            bind(Some(interrupter.clone()));
            handle(number);
            bind(None);
            assert_eq!(interrupter.interruption().unwrap().reason.as_deref(), Some(name));
        }
    }

    #[test]
    fn a_signal_that_the_program_handles_is_left_to_it() {
        use signal_hook::consts::SIGUSR2;
        assert!(is_default(SIGUSR2));
        flag::register(SIGUSR2, Arc::default()).unwrap();
        assert!(!is_default(SIGUSR2));
    }
}
