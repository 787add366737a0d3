//! The side of a conversation that a person sees.

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::mpsc::{Receiver, Sender};

use super::super::write_now;
use super::conversation::{COMMANDS, Conversation, Line};
use super::{Answer, Turn};
use crate::console::warn;

/// Reads standard input.
pub(super) struct Terminal {
    pub conversation: Conversation,
    /// By rank.
    pub turns: Vec<Sender<Turn>>,
    /// `None` first, and after another adapter, when the model is there.
    pub answered: Receiver<Option<Answer>>,
    /// By number.
    pub adapters: Vec<String>,
    /// Why standard input could not be read to its end.
    pub refused: Sender<io::Error>,
}

impl Terminal {
    /// Until the input ends, or the ranks have; dropping the senders ends them.
    pub fn run(mut self) {
        let person = io::stdin().is_terminal();
        if !matches!(self.answered.recv(), Ok(None)) {
            return;
        }
        if person {
            warn(COMMANDS);
        }
        loop {
            if person && write_now("> ").is_err() {
                return;
            }
            let mut line = String::new();
            match io::stdin().lock().read_line(&mut line) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) => {
                    let _ = self.refused.send(error);
                    return;
                }
            }
            match Line::parse(&line) {
                Line::Quit => return,
                Line::Empty => {}
                Line::Help => warn(COMMANDS),
                Line::Unknown(command) => warn(format_args!("{command} is no command: {COMMANDS}")),
                Line::Adapter(name) => match self.adapters.iter().position(|known| known == name) {
                    None => warn(format_args!("there is no adapter `{name}`; there are {}", self.adapters.join(", "))),
                    Some(number) => {
                        if !self.ask(Turn::Adapter(number)) || !matches!(self.answered.recv(), Ok(None)) {
                            return;
                        }
                    }
                },
                Line::Reset => self.conversation.reset(),
                Line::System(text) => self.conversation.begin(Some(text).filter(|text| !text.is_empty())),
                Line::Say(text) => match self.conversation.say(text) {
                    Err(what) => warn(what),
                    Ok((turn, left_out)) => {
                        if left_out > 0 {
                            warn(format_args!(
                                "the oldest {left_out} messages are left out: the model has no room for them"
                            ));
                        }
                        if !self.answer(Turn::Say(turn), person) {
                            return;
                        }
                    }
                },
            }
        }
    }

    /// Tells all ranks; false if they have ended.
    fn ask(&self, turn: Turn) -> bool {
        self.turns.iter().all(|rank| rank.send(turn.clone()).is_ok())
    }

    /// Lets the ranks write the answer; false if they have ended, or nobody reads it.
    fn answer(&mut self, turn: Turn, person: bool) -> bool {
        if !self.ask(turn) {
            return false;
        }
        let Ok(Some(Answer { text, generated })) = self.answered.recv() else { return false };
        self.conversation.answered(&text);
        if person {
            let rate = generated.tokens.len().saturating_sub(1) as f64 / generated.decode_seconds.max(1e-9);
            let _ = write!(io::stderr(), "\n[{} tokens, {rate:.1} tokens/s]", generated.tokens.len());
        }
        write_now("\n").is_ok()
    }
}
