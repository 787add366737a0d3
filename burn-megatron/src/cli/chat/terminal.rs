//! The side of a conversation that a person sees.

use std::io::{self, BufRead, IsTerminal};
use std::sync::mpsc::{Receiver, Sender};

use super::super::write_now;
use super::conversation::{COMMANDS, Conversation, Line};
use super::{Answer, Turn};

/// Reads standard input.
pub(super) struct Terminal {
    pub conversation: Conversation,
    /// By rank.
    pub turns: Vec<Sender<Turn>>,
    /// `None` first, and after another adapter, when the model is there.
    pub answered: Receiver<Option<Answer>>,
    /// By number.
    pub adapters: Vec<String>,
}

impl Terminal {
    /// Until the input ends, or the ranks have; dropping the senders ends them.
    pub fn run(mut self) {
        let person = io::stdin().is_terminal();
        if !matches!(self.answered.recv(), Ok(None)) {
            return;
        }
        if person {
            eprintln!("{COMMANDS}");
        }
        loop {
            if person && write_now("> ").is_err() {
                return;
            }
            let mut line = String::new();
            match io::stdin().lock().read_line(&mut line) {
                Ok(0) => return,
                Ok(_) => {}
                Err(error) => return eprintln!("cannot read the message: {error}"),
            }
            match Line::parse(&line) {
                Line::Quit => return,
                Line::Empty => {}
                Line::Help => eprintln!("{COMMANDS}"),
                Line::Unknown(command) => eprintln!("{command} is no command: {COMMANDS}"),
                Line::Adapter(name) => match self.adapters.iter().position(|known| known == name) {
                    None => eprintln!("there is no adapter `{name}`; there are {}", self.adapters.join(", ")),
                    Some(number) => {
                        if !self.ask(Turn::Adapter(number)) || !matches!(self.answered.recv(), Ok(None)) {
                            return;
                        }
                    }
                },
                Line::Reset => self.conversation.reset(),
                Line::System(text) => self.conversation.begin(Some(text).filter(|text| !text.is_empty())),
                Line::Say(text) => match self.conversation.say(text) {
                    Err(what) => eprintln!("{what}"),
                    Ok((turn, left_out)) => {
                        if left_out > 0 {
                            eprintln!("the oldest {left_out} messages are left out: the model has no room for them");
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
            eprint!("\n[{} tokens, {rate:.1} tokens/s]", generated.tokens.len());
        }
        write_now("\n").is_ok()
    }
}
