//! Where a rank's interpreter runs: on the thread that tells it what to do, or on one of its own, so that the program
//! continues while operations are planned and launched.

use super::follow::{Message, next};
use super::interpreter::Interpret;
use ranks::comm::Aborted;
use ranks::launch::Rank;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};

/// Jobs after which the program waits for the worker: what is queued is memory too.
const MOST_AHEAD: usize = 8192;

/// An interpreter that does what it is told, in order.
pub(super) enum Worker {
    /// At once.
    Here(Box<dyn Interpret>),
    /// Later, on a thread of its own. Its failure is the rank's; whoever speaks to it afterwards stops.
    Ahead {
        jobs: Sender<Job>,
        /// How many since the program last waited.
        queued: usize,
    },
}

/// What waits for the thread.
pub(super) enum Job {
    Obey(Message),
    Answer(Question),
}

type Question = Box<dyn FnOnce(&mut dyn Interpret) + Send>;

impl Worker {
    /// On a thread of `rank`.
    pub fn ahead(rank: &Rank, mut interpreter: Box<dyn Interpret>) -> Self {
        let (jobs, queue) = channel();
        rank.spawn("device", move || work(&mut *interpreter, &queue));
        Self::Ahead { jobs, queued: 0 }
    }

    /// What `message` says.
    pub fn tell(&mut self, message: Message) {
        match self {
            Self::Here(interpreter) => message.obey(&mut **interpreter),
            Self::Ahead { .. } => {
                self.queue(Job::Obey(message));
                self.wait_if_far_ahead();
            }
        }
    }

    /// The answer to `question`, after everything that was told.
    pub fn ask<T: Send + 'static>(&mut self, question: impl FnOnce(&mut dyn Interpret) -> T + Send + 'static) -> T {
        let answer = self.asked(question).wait();
        if let Self::Ahead { queued, .. } = self {
            *queued = 0;
        }
        answer
    }

    /// [`ask`](Self::ask), for those who let others speak to the worker while they wait.
    pub fn asked<T: Send + 'static>(
        &mut self,
        question: impl FnOnce(&mut dyn Interpret) -> T + Send + 'static,
    ) -> Asked<T> {
        match self {
            Self::Here(interpreter) => Asked::Now(question(&mut **interpreter)),
            Self::Ahead { .. } => {
                let (sender, answer) = sync_channel(1);
                self.queue(Job::Answer(Box::new(move |interpreter| {
                    // Nobody waits any more if the program has stopped.
                    let _ = sender.send(question(interpreter));
                })));
                Asked::Later(answer)
            }
        }
    }

    fn queue(&mut self, job: Job) {
        let Self::Ahead { jobs, queued } = self else { unreachable!("only a thread has a queue") };
        *queued += 1;
        jobs.send(job).unwrap_or_else(|_| stop());
    }

    fn wait_if_far_ahead(&mut self) {
        if matches!(self, Self::Ahead { queued: MOST_AHEAD.., .. }) {
            self.ask(|_| ());
        }
    }
}

/// An answer, or where it will be.
pub(super) enum Asked<T> {
    Now(T),
    Later(Receiver<T>),
}

impl<T> Asked<T> {
    pub fn wait(self) -> T {
        match self {
            Self::Now(answer) => answer,
            Self::Later(answer) => answer.recv().unwrap_or_else(|_| stop()),
        }
    }
}

fn work(interpreter: &mut dyn Interpret, queue: &Receiver<Job>) {
    while let Some(job) = next(queue, || interpreter.hand_over()) {
        match job {
            Job::Obey(message) => message.obey(interpreter),
            Job::Answer(question) => question(interpreter),
        }
    }
}

/// The thread has failed, and has told the world why.
fn stop() -> ! {
    resume_unwind(Box::new(Aborted))
}
