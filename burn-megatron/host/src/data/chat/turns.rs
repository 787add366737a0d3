//! Where assistant turns are in a text whose template does not mark them: what each adds to the text before it.

use std::ops::Range;

use minijinja::Error;

/// Bytes of the text that the assistant messages `assistant` (indices) have added to `text`, the whole conversation.
/// `render(n, prompted)` renders the first `n` messages, with the beginning of an assistant turn where `prompted`.
/// Fails if a beginning of the conversation is not rendered as the beginning of the text: templates that treat the last
/// turn in another way, for example by removing what was thought in earlier ones.
pub(super) fn by_prefixes(
    text: &str,
    assistant: &[usize],
    render: impl Fn(usize, bool) -> Result<String, Error>,
) -> Result<Vec<Range<usize>>, String> {
    let prefix = |count: usize, prompted: bool, index: usize| {
        let rendered = render(count, prompted).map_err(|error| {
            format!("messages[{index}]: the chat template has no {{% generation %}} blocks and fails for the {count} first messages: {error}")
        })?;
        match text.starts_with(&rendered) {
            true => Ok(rendered.len()),
            false => Err(format!(
                "messages[{index}]: the chat template writes the first messages in another way when there are more, so the assistant \
                 turn cannot be found in the text; put {{% generation %}} and {{% endgeneration %}} around the assistant's text in \
                 the template"
            )),
        }
    };
    let mut turns = Vec::with_capacity(assistant.len());
    for &index in assistant {
        let (start, end) = (prefix(index, true, index)?, prefix(index + 1, false, index)?);
        if start >= end {
            return Err(format!("messages[{index}]: the chat template writes nothing for this assistant turn"));
        }
        turns.push(start..end);
    }
    Ok(turns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_what_each_message_adds_and_other_beginnings_are_refused() {
        let messages = ["u:a\n", "m:b\n", "u:c\n", "m:d\n"];
        let render = |count: usize, prompted: bool| Ok(messages[..count].concat() + if prompted { "m:" } else { "" });
        let text = messages.concat();
        assert_eq!(by_prefixes(&text, &[1, 3], render), Ok(vec![6..8, 14..16]));
        let forgetful = |count: usize, prompted: bool| {
            let last = if count == 2 { "m:<think>b\n" } else { "m:b\n" };
            let all = ["u:a\n", last, "u:c\n", "m:d\n"];
            Ok(all[..count].concat() + if prompted { "m:" } else { "" })
        };
        let refused = by_prefixes(&text, &[1, 3], forgetful).unwrap_err();
        assert!(refused.contains("messages[1]") && refused.contains("{% generation %}"), "{refused}");
    }
}
