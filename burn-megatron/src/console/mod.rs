//! Output while training: burn-train's dashboard on a terminal, one line per step elsewhere.

mod dashboard;
pub mod format;
mod log_renderer;

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;

use burn::train::Interrupter;
use burn::train::renderer::MetricsRenderer;

pub use log_renderer::{LogRenderer, STEPS};

/// burn-train's dashboard when stdout is a terminal that can draw it, else a [`LogRenderer`].
///
/// `resumed_epoch` is the epoch of the checkpoint that the run continues, if it does.
///
/// ```no_run
/// use burn::train::{Interrupter, LearnerModel, SupervisedTraining};
/// use burn_megatron::prelude::*;
///
/// fn with_screen<M: LearnerModel>(training: SupervisedTraining<M>) -> SupervisedTraining<M> {
///     let interrupter = Interrupter::new();
///     training.with_interrupter(interrupter.clone()).renderer(renderer(interrupter, None))
/// }
/// ```
pub fn renderer(interrupter: Interrupter, resumed_epoch: Option<usize>) -> Box<dyn MetricsRenderer> {
    if dashboard_possible() {
        dashboard::dashboard(interrupter, resumed_epoch)
    } else {
        Box::new(LogRenderer::stdout())
    }
}

/// Why the first line could not be printed that could not.
static UNWRITTEN: OnceLock<io::Error> = OnceLock::new();

/// Prints a line. A reader that closes the pipe (`| head`) does not end the program, and neither does a full disk, which
/// [`unwritten`] tells.
pub fn say(line: impl Display) {
    let mut out = io::stdout().lock();
    if let Err(error) = writeln!(out, "{line}").and_then(|()| out.flush())
        && error.kind() != io::ErrorKind::BrokenPipe
    {
        // The first says all.
        let _ = UNWRITTEN.set(error);
    }
}

/// Why a line was not printed: of what is nothing but its output the exit code says so.
pub fn unwritten() -> Option<&'static io::Error> {
    UNWRITTEN.get()
}

/// Prints a line to standard error. Nothing depends on whether somebody reads it.
pub fn warn(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Whether stdout and stdin are a terminal that can draw the dashboard.
pub fn dashboard_possible() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    cfg!(feature = "dashboard") && io::stdout().is_terminal() && io::stdin().is_terminal() && !dumb
}
