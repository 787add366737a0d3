//! Texts that end a text.

/// Gives a text as it comes, up to the first of some stop strings: what could be the beginning of one is held back.
///
/// ```
/// use burn_megatron::serve::StopStrings;
///
/// let mut stop = StopStrings::new(vec!["END".into()]);
/// assert_eq!(stop.push("one E"), ("one ".to_string(), false));
/// assert_eq!(stop.push("very EN"), ("Every ".to_string(), false));
/// assert_eq!(stop.push("D of it"), (String::new(), true));
/// let mut shown = StopStrings::new(vec!["END".into()]).shown(true);
/// assert_eq!(shown.push("The END of it"), ("The END".to_string(), true));
/// ```
#[derive(Clone, Debug)]
pub struct StopStrings {
    strings: Vec<String>,
    is_shown: bool,
    held: String,
}

impl StopStrings {
    /// The strings; empty ones stop nothing.
    pub fn new(mut strings: Vec<String>) -> Self {
        strings.retain(|string| !string.is_empty());
        Self { strings, is_shown: false, held: String::new() }
    }

    /// The stop string that ends the text is shown too, or not.
    pub fn shown(self, is_shown: bool) -> Self {
        Self { is_shown, ..self }
    }

    /// Takes more of the text; gives what can be shown of it, and whether a stop string has ended it.
    pub fn push(&mut self, text: &str) -> (String, bool) {
        self.held += text;
        let find = |string: &String| Some((self.held.find(string.as_str())?, string.len()));
        if let Some((start, len)) = self.strings.iter().filter_map(find).min() {
            self.held.truncate(if self.is_shown { start + len } else { start });
            return (std::mem::take(&mut self.held), true);
        }
        let is_open = |at: &usize| self.strings.iter().any(|string| string.starts_with(&self.held[*at..]));
        let mut starts = self.held.char_indices().map(|(at, _)| at);
        let rest = self.held.split_off(starts.find(is_open).unwrap_or(self.held.len()));
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back, when the text has ended in another way.
    pub fn rest(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// However a text comes, what is shown is the text up to the first stop string.
        #[test]
        fn pieces_make_up_the_text_before_the_first_stop(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            strings in prop::collection::vec("[abé]{0,3}", 0..4),
        ) {
            let text = pieces.concat();
            let ends = strings.iter().filter(|string| !string.is_empty()).filter_map(|string| {
                text.find(string.as_str()).map(|at| (at + string.len(), at))
            });
            let mut stop = StopStrings::new(strings.clone());
            let (mut shown, mut stopped) = (String::new(), false);
            for piece in &pieces {
                let (text, end) = stop.push(piece);
                shown += &text;
                stopped = end;
                if end {
                    break;
                }
            }
            if !stopped {
                shown += &stop.rest();
            }
            prop_assert_eq!(stopped, ends.clone().next().is_some());
            prop_assert!(text.starts_with(&shown));
            match stopped {
                false => prop_assert_eq!(shown, text),
                true => prop_assert!(ends.map(|(_, at)| at).any(|at| at == shown.len())),
            }
        }
    }
}
