//! burn-train's dashboard, on which Ctrl-C stops the run as elsewhere, and *Kill the program* ends it.

use std::panic::{set_hook, take_hook};
use std::time::Duration;

use burn::train::Interrupter;
use burn::train::renderer::{MetricsRenderer, default_renderer};
use rustix::stdio::stdin;
use rustix::termios::{LocalModes, OptionalActions, SpecialCodeIndex, tcgetattr, tcsetattr};

/// What burn-train panics with, on the thread that renders, after *Kill the program*. The ranks would wait for ever.
const KILLED: &str = "Killing training from user input.";
/// As shells report a program that Ctrl-C has ended.
const EXIT_CODE: i32 = 130;
/// How long the dashboard's thread may take to set up the terminal, and between two looks.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_millis(5));

pub(super) fn dashboard(interrupter: Interrupter, resumed_epoch: Option<usize>) -> Box<dyn MetricsRenderer> {
    let renderer = default_renderer(interrupter, resumed_epoch);
    if send_signals() {
        let hook = take_hook();
        set_hook(Box::new(move |info| {
            hook(info);
            if info.payload_as_str() == Some(KILLED) {
                std::process::exit(EXIT_CODE);
            }
        }));
    }
    renderer
}

/// Has Ctrl-C send its signal also in the dashboard's raw mode, where it is a key that burn-train does not know. Whether
/// the dashboard is there.
fn send_signals() -> bool {
    for _ in 0..PATIENCE.0.as_millis() / PATIENCE.1.as_millis() {
        let Ok(mut terminal) = tcgetattr(stdin()) else { return false };
        if !terminal.local_modes.contains(LocalModes::ICANON) {
            terminal.local_modes |= LocalModes::ISIG;
            // A program that is suspended would leave its screen behind.
            for key in [SpecialCodeIndex::VSUSP, SpecialCodeIndex::VQUIT] {
                terminal.special_codes[key] = 0;
            }
            // Its hook for panics comes right after.
            std::thread::sleep(PATIENCE.1);
            return tcsetattr(stdin(), OptionalActions::Now, &terminal).is_ok();
        }
        std::thread::sleep(PATIENCE.1);
    }
    false
}
