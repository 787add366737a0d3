//! Panics of rank threads: stored for the launch, which reports the first one, instead of printed.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{PanicHookInfo, set_hook, take_hook};
use std::sync::Arc;

use parking_lot::Mutex;

thread_local! {
    /// `Some` on rank threads: the message and position of the last panic.
    static IS_RANK: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// While it lives, panics of rank threads are stored instead of printed: `launch` reports them once, with the rank's
/// name; printing them from the thread as well would tear the dashboard. Launches may overlap; the last one to end puts
/// the previous hook back.
pub(super) struct RankPanics;

type Hook = Box<dyn Fn(&PanicHookInfo<'_>) + Sync + Send>;

/// Running launches, and the hook that was there before them.
static PREVIOUS: Mutex<(usize, Option<Arc<Hook>>)> = Mutex::new((0, None));

/// From now on panics of this thread are a rank's.
pub(super) fn enter_rank() {
    IS_RANK.with_borrow_mut(|last| *last = Some(String::new()));
}

impl RankPanics {
    pub fn store() -> Self {
        let mut state = PREVIOUS.lock();
        if state.0 == 0 {
            let previous = Arc::new(take_hook());
            state.1 = Some(previous.clone());
            set_hook(Box::new(move |info| {
                if !store_on_rank_thread(info) {
                    previous(info);
                }
            }));
        }
        state.0 += 1;
        Self
    }
}

impl Drop for RankPanics {
    fn drop(&mut self) {
        let mut state = PREVIOUS.lock();
        state.0 -= 1;
        // A panicking thread may not change the hook; ours then stays, and passes on what is not a rank's.
        if state.0 == 0 && !std::thread::panicking() {
            drop(take_hook());
            if let Some(previous) = state.1.take().and_then(Arc::into_inner) {
                set_hook(previous);
            }
        }
    }
}

/// Stores message and position if this is a rank's thread.
fn store_on_rank_thread(info: &PanicHookInfo<'_>) -> bool {
    IS_RANK.with_borrow_mut(|last| {
        let Some(last) = last else { return false };
        let message = info.payload_as_str().unwrap_or("no message");
        *last = match info.location() {
            Some(location) => format!("{message} (at {}:{})", location.file(), location.line()),
            None => message.to_string(),
        };
        true
    })
}

/// The message of a rank's panic, with its position.
pub(super) fn panic_message(payload: &(dyn Any + Send)) -> String {
    let kept = IS_RANK.with_borrow_mut(|last| last.as_mut().map(std::mem::take)).unwrap_or_default();
    if !kept.is_empty() {
        return kept;
    }
    let text = payload.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".into())
}
